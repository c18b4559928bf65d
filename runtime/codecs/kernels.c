/* Group codecs for CPU, one pass over memory each way; equal to reference.py bit for bit (the tests compare them).
 *
 * A block of 256 values stays in the first-level cache through all its stages: load (minus the channel means), rotate,
 * scales, round, pack; decoding goes the other way. Arithmetic is on vectors of 16 lanes that the compiler splits where the
 * machine has narrower ones. Magnitudes are compared as integers: for positive floats the order is the same, and NaN
 * is the largest. Compiled without contraction or reassociation: results are those of IEEE single precision.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PARALLEL if (f->threads > 1 && f->numel >= 32768)
#define BLOCK 256
#define LANES 16
#define VECTORS (BLOCK / LANES)
#define STEP 32 /* the smallest group; scales are kept per step */
#define STEPS (BLOCK / STEP)
#define TINY 0x1p-100f
#define LIFT 0x1p100f
#define FINE 255.0f
#define INDEX_STEP 0x9e3779b1u
#define INFINITE 0x7f800000u
#define ROTATED_LIMIT 0x7b800000u /* 2^120 */
#define NUDGE (1.0f + 0x1p-22f)
#define ROUNDER 12582912.0f /* a sum with it has the nearest integer, ties to even, in its low bits */
enum { INT, BOOK, E4M3, E5M2 };

typedef uint8_t u8;
typedef uint16_t u16, bf16;
typedef float f32;
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
#define AT(type, pointer) (*(type *)(pointer))
#define LANE_NUMBERS ((words){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#define CHOOSE(type, mask, yes, no) ((type)(((integers)(yes) & (mask)) | ((integers)(no) & ~(mask))))

/* native.py's Form has the same fields. "mean" holds channels + BLOCK floats, repeating, or is absent. "shift": a group
 * is STEP << shift values. */
typedef struct {
    int64_t numel, start, channels;
    const float *mean;
    int32_t kind, bits, group, groups, shift, fine, asymmetric, rotated, stochastic, wide, levels, zero, threads;
    uint32_t salt;
    float values[16], thresholds[16];
} Form;

#define MOST_bf16 0x7f7f0000u
#define MOST_f32 0x7f7fffffu
INLINE float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE words magnitudes(floats value) { return (words)value & 0x7fffffffu; }

INLINE floats load_bf16(const bf16 *x) { return (floats)(__builtin_convertvector(AT(const halves, x), words) << 16); }
INLINE floats load_f32(const f32 *x) { return AT(const floats, x); }
INLINE void store_bf16(bf16 *x, floats value) {
    words bits = (words)value;
    AT(halves, x) = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, halves);
}
INLINE void store_f32(f32 *x, floats value) { AT(floats, x) = value; }

/* in two steps, since GCC 12 takes a single one apart */
INLINE words widened(const u8 *q) {
    return __builtin_convertvector(__builtin_convertvector(AT(const bytes, q), halves), words);
}

/* --- shuffles ---------------------------------------------------------------------------------------------------- */
#ifdef __clang__
#define SWAPPED(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#define PICKED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
INLINE floats looked_up(const float *table, integers place) {
    floats found;
    for (int i = 0; i < LANES; i++) found[i] = table[place[i]];
    return found;
}
#else
#define SWAPPED(a, ...) __builtin_shuffle(a, (integers){__VA_ARGS__})
#define PICKED(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
INLINE floats looked_up(const float *table, integers place) { return __builtin_shuffle(AT(const floats, table), place); }
#endif
#define BY1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define BY2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define BY4 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define BY8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7

/* 64 values times the Hadamard matrix and unit: sums of pairs at distances 8, 16, 32, 1, 2, 4 */
#define MIX(a, signs, ...) a = SWAPPED(a, __VA_ARGS__) + a * signs
#define MIX_ALL(signs, ...) MIX(a, signs, __VA_ARGS__); MIX(b, signs, __VA_ARGS__); MIX(c, signs, __VA_ARGS__); \
    MIX(d, signs, __VA_ARGS__)
INLINE void rotate(floats *r, const float unit) {
    const floats by8 = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    const floats by1 = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
    const floats by2 = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
    const floats by4 = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
    floats a = r[0], b = r[1], c = r[2], d = r[3], e, g, h, i;
    MIX_ALL(by8, BY8);
    e = a + b; g = a - b; h = c + d; i = c - d;
    a = e + h; b = g + i; c = e - h; d = g - i;
    MIX_ALL(by1, BY1);
    MIX_ALL(by2, BY2);
    MIX_ALL(by4, BY4);
    r[0] = a * unit; r[1] = b * unit; r[2] = c * unit; r[3] = d * unit;
}

INLINE floats within(floats value, float most) {
    value = CHOOSE(floats, value > most, (floats){0} + most, value);
    return CHOOSE(floats, value < -most, (floats){0} - most, value);
}
INLINE words larger(words a, words b) { return CHOOSE(words, (integers)(a > b), a, b); }
INLINE floats smaller(floats a, floats b) { return CHOOSE(floats, a < b, a, b); }
/* lanes 2i of the result: reductions over lane pairs of a; 2i + 1: of b; and so on with distances 2 and 4 */
#define MERGE1(op, a, b) op(PICKED(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), \
                            PICKED(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#define MERGE2(op, a, b) op(PICKED(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), \
                            PICKED(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define MERGE4(op, a, b) op(PICKED(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), \
                            PICKED(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
/* one reduction per step from a vector per step, then per group: lane k (and k + 8) is that of the group of step k */
#define REDUCE(type, op) \
    INLINE type op##_of_groups(const type *v, int shift) { \
        type ab = MERGE1(op, v[0], v[1]), cd = MERGE1(op, v[2], v[3]); \
        type ef = MERGE1(op, v[4], v[5]), gh = MERGE1(op, v[6], v[7]); \
        type found = MERGE4(op, MERGE2(op, ab, cd), MERGE2(op, ef, gh)); \
        found = op(found, SWAPPED(found, BY8)); \
        if (shift > 0) found = op(found, SWAPPED(found, BY1)); \
        if (shift > 1) found = op(found, SWAPPED(found, BY2)); \
        if (shift > 2) found = op(found, SWAPPED(found, BY4)); \
        return found; \
    }
REDUCE(words, larger)
REDUCE(floats, smaller)

/* --- 8-bit floats of magnitudes that fit, ties to even; below the smallest normal a sum with CARRIER rounds ------- */
#define MINIFLOAT(name, DROPPED, REBIAS, SMALLEST, CARRIER, FIRST, UNIT) \
    INLINE words to_##name(floats value) { \
        words magnitude = magnitudes(value), sign = ((words)value >> 24) & 0x80u; \
        words normal = ((magnitude + ((1u << (DROPPED - 1)) - 1u) + ((magnitude >> DROPPED) & 1u)) >> DROPPED) - REBIAS; \
        words small = (words)((floats)magnitude + CARRIER) - as_bits(CARRIER); \
        return CHOOSE(words, (integers)(magnitude >= SMALLEST), normal, small) | sign; \
    } \
    INLINE floats from_##name(words code) { \
        words magnitude = code & 0x7fu, normal = (magnitude + REBIAS) << DROPPED; \
        floats small = __builtin_convertvector((integers)magnitude, floats) * UNIT; \
        words found = CHOOSE(words, (integers)(magnitude >= FIRST), normal, small); \
        return (floats)(found | ((code & 0x80u) << 24)); \
    }
MINIFLOAT(e4m3, 20, (120u << 3), 0x3c800000u, 0x1p14f, 8u, 0x1p-9f)
MINIFLOAT(e5m2, 21, (112u << 2), 0x38800000u, 0x1p7f, 4u, 0x1p-16f)

/* --- parameters: bfloat16 rounded up, or float32 ---------------------------------------------------------------- */
INLINE float up(float value) {
    uint32_t bits = as_bits(value);
    return as_float((bits >> 31 ? bits : bits + 0xffffu) & 0xffff0000u);
}
INLINE void put(void *parameters, int64_t place, float value, int wide) {
    if (wide) ((float *)parameters)[place] = value;
    else ((bf16 *)parameters)[place] = (bf16)(as_bits(value) >> 16);
}
INLINE float get(const void *parameters, int64_t place, int wide) {
    return wide ? ((const float *)parameters)[place] : as_float((uint32_t)((const bf16 *)parameters)[place] << 16);
}

/* --- packing of the low bits of 256 bytes: fields of 4, 2 and 1 bits ------------------------------------------------ */
#define FIELD(W) \
    INLINE void pack##W(const u8 *restrict q, int shift, u8 *restrict out) { \
        for (int j = 0; j < 32 * W; j++) { \
            unsigned byte = 0; \
            for (int k = 0; k < 8 / W; k++) byte |= ((unsigned)(q[k * 32 * W + j] >> shift) & ((1u << W) - 1u)) << (W * k); \
            out[j] = (u8)byte; \
        } \
    } \
    INLINE void unpack##W(const u8 *restrict in, int shift, u8 *restrict q) { \
        for (int k = 0; k < 8 / W; k++) \
            for (int j = 0; j < 32 * W; j++) \
                q[k * 32 * W + j] |= (u8)(((in[j] >> (W * k)) & ((1 << W) - 1)) << shift); \
    }
FIELD(4)
FIELD(2)
FIELD(1)
static void pack_fields(const u8 *q, int bits, u8 *out) {
    int shift = 0;
    if (bits & 4) { pack4(q, shift, out); out += 128; shift += 4; }
    if (bits & 2) { pack2(q, shift, out); out += 64; shift += 2; }
    if (bits & 1) pack1(q, shift, out);
}
static void unpack_fields(const u8 *in, int bits, u8 *q) {
    int shift = 0;
    memset(q, 0, BLOCK);
    if (bits & 4) { unpack4(in, shift, q); in += 128; shift += 4; }
    if (bits & 2) { unpack2(in, shift, q); in += 64; shift += 2; }
    if (bits & 1) unpack1(in, shift, q);
}

/* --- scales -------------------------------------------------------------------------------------------------------- */
typedef struct { float low[LANES], extent[LANES], lift[LANES], factor[LANES]; } Scales;

/* each step's scale as a share of the block's in 255ths, rounded up, and as it decodes */
INLINE void fine_scales(const uint32_t *largest, float whole, u8 *share, float *extent) {
    const float divisor = whole == 0 ? 1 : whole;
    for (int k = 0; k < STEPS; k++) {
        float magnitude = as_float(largest[k]), part = ceilf(magnitude / divisor * FINE);
        part = part > FINE ? FINE : part;
        float more = part + 1 > FINE ? FINE : part + 1;
        part = whole * (part * (1.0f / FINE)) < magnitude ? more : part;
        part = whole < TINY && magnitude > 0 ? FINE : part;
        share[k] = (u8)(int32_t)part;
        extent[k] = whole * (part * (1.0f / FINE));
    }
}

INLINE void ranges(const Form *f, const floats *r, Scales *s) {
    floats low[STEPS], high[STEPS];
    for (int k = 0; k < STEPS; k++) {
        low[k] = smaller(r[2 * k], r[2 * k + 1]);
        high[k] = smaller(-r[2 * k], -r[2 * k + 1]);
    }
    AT(floats, s->low) = smaller_of_groups(low, f->shift);
    AT(floats, s->extent) = -smaller_of_groups(high, f->shift);
    /* adding 0 leaves no negative zeros */
    for (int k = 0; k < STEPS; k++) {
        s->low[k] = (f->wide ? s->low[k] : -up(-s->low[k])) + 0.0f;
        s->extent[k] = (f->wide ? s->extent[k] : up(s->extent[k])) + 0.0f;
    }
}

/* scales of all steps and, stored, the parameters of all groups; the number of groups that cannot be encoded */
INLINE int scales_of(const Form *f, const floats *r, void *parameters, int64_t block, Scales *s, u8 *shares) {
    const int groups = f->groups, shift = f->shift, wide = f->wide;
    const uint32_t limit = f->rotated ? ROTATED_LIMIT : INFINITE - 1;
    uint32_t largest[LANES], most = 0;
    words peaks[STEPS];
    int bad = 0;
    for (int k = 0; k < STEPS; k++) peaks[k] = larger(magnitudes(r[2 * k]), magnitudes(r[2 * k + 1]));
    AT(words, largest) = larger_of_groups(peaks, shift);
    AT(floats, s->low) = (floats){0};
    if (f->asymmetric) {
        ranges(f, r, s);
        for (int g = 0; g < groups; g++) {
            put(parameters, 2 * (block * groups + g), s->low[g << shift], wide);
            put(parameters, 2 * (block * groups + g) + 1, s->extent[g << shift], wide);
        }
        for (int k = 0; k < STEPS; k++) s->extent[k] -= s->low[k];
    } else if (f->fine) {
        u8 share[STEPS];
        for (int k = 0; k < STEPS; k++) most = largest[k] > most ? largest[k] : most;
        float whole = wide ? as_float(most) : up(as_float(most));
        put(parameters, block, whole, wide);
        fine_scales(largest, whole, share, s->extent);
        for (int g = 0; g < groups; g++) shares[g] = share[g << shift];
    } else {
        for (int k = 0; k < STEPS; k++) s->extent[k] = wide ? as_float(largest[k]) : up(as_float(largest[k]));
        for (int g = 0; g < groups; g++) put(parameters, block * groups + g, s->extent[g << shift], wide);
    }
    for (int k = 0; k < STEPS; k++) {
        float extent = s->extent[k], lift = extent < TINY ? LIFT : 1.0f;
        s->lift[k] = lift;
        s->factor[k] = extent == 0 ? 0.0f : (float)f->levels / (extent * lift);
        bad += largest[k] > limit || (as_bits(extent) & 0x7fffffffu) >= INFINITE;
    }
    return bad >> shift;
}

/* --- rounding of a block: codes of 8 bits into q, of more into high as well ------------------------------------------ */
INLINE void put_codes(words code, u8 *q, u8 *high, int wider) {
    AT(bytes, q) = __builtin_convertvector(code, bytes);
    if (wider) AT(bytes, high) = __builtin_convertvector(code >> 8, bytes);
}
INLINE words nearest(floats scaled, int zero) { return (words)(scaled + ROUNDER) - as_bits(ROUNDER) + (uint32_t)zero; }
INLINE words stochastic(floats scaled, words hash, int zero, int levels) {
    hash = (hash ^ (hash >> 16)) * 0x7feb352du;
    hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
    hash ^= hash >> 16;
    floats moved = scaled * NUDGE + __builtin_convertvector((integers)(hash >> 8), floats) * 0x1p-24f;
    floats whole = (moved + ROUNDER) - ROUNDER;
    whole -= CHOOSE(floats, whole > moved, (floats){0} + 1, (floats){0});
    const floats least = (floats){0} - (float)zero, most = (floats){0} + (float)levels;
    whole = CHOOSE(floats, whole < least, least, whole);
    whole = CHOOSE(floats, whole > most, most, whole);
    return (words)__builtin_convertvector(whole, integers) + (uint32_t)zero;
}
INLINE words in_book(floats scaled, const float *thresholds) {
    integers found = {0};
    for (int t = 0; t < 15; t++) found -= scaled > thresholds[t];
    return (words)found;
}
#define EACH_VECTOR(code) \
    for (int v = 0; v < VECTORS; v++) { \
        const int k = v / 2; \
        const floats scaled = (r[v] - s->low[k]) * s->lift[k] * s->factor[k]; \
        put_codes(code, q + v * LANES, high + v * LANES, wider); \
    }
INLINE void round_block(const Form *f, const floats *r, const Scales *s, u8 *q, u8 *high, uint32_t index) {
    const int wider = f->bits > 8, zero = f->zero;
    const words lanes = LANE_NUMBERS * INDEX_STEP + index;
    if (f->kind == BOOK) EACH_VECTOR(in_book(scaled, f->thresholds))
    else if (f->kind == E4M3) EACH_VECTOR(to_e4m3(scaled))
    else if (f->kind == E5M2) EACH_VECTOR(to_e5m2(scaled))
    else if (f->stochastic) EACH_VECTOR(stochastic(scaled, lanes + (uint32_t)(v * LANES) * INDEX_STEP, zero, f->levels))
    else EACH_VECTOR(nearest(scaled, zero))
}

INLINE int block_bytes(const Form *f) { return 32 * f->bits + (f->fine ? f->groups : 0); }

INLINE int encode_block(const Form *f, floats *r, u8 *codes, void *parameters, int64_t block) {
    Scales s;
    u8 low[BLOCK] __attribute__((aligned(64))), high[BLOCK] __attribute__((aligned(64)));
    int bad = 0;
    if (f->rotated) for (int v = 0; v < VECTORS; v += 4) rotate(r + v, 1.0f / 64);
    if (f->group) {
        bad = scales_of(f, r, parameters, block, &s, codes + 32 * f->bits);
    } else {
        words most = {0};
        for (int v = 0; v < VECTORS; v++) most = larger(most, magnitudes(r[v]));
        for (int i = 0; i < LANES; i++) bad |= most[i] > as_bits((float)f->levels);
        for (int k = 0; k < STEPS; k++) s.low[k] = 0, s.lift[k] = s.factor[k] = 1;
    }
    if (bad) {
        memset(codes, 0, (size_t)block_bytes(f));
        return bad;
    }
    round_block(f, r, &s, f->bits < 8 ? low : codes, high, f->salt + (uint32_t)(block * BLOCK) * INDEX_STEP);
    if (f->bits < 8) pack_fields(low, f->bits, codes);
    if (f->bits > 8) pack_fields(high, f->bits - 8, codes + BLOCK);
    return 0;
}

/* --- and back ------------------------------------------------------------------------------------------------------- */
INLINE void extents_of(const Form *f, const u8 *shares, const void *parameters, int64_t block, Scales *s) {
    const int64_t first = block * f->groups;
    const int shift = f->shift;
    if (f->fine) {
        const float whole = get(parameters, block, f->wide);
        for (int k = 0; k < STEPS; k++) s->extent[k] = whole * ((float)(int32_t)shares[k >> shift] * (1.0f / FINE));
    } else if (f->asymmetric) {
        for (int k = 0; k < STEPS; k++) {
            s->low[k] = get(parameters, 2 * (first + (k >> shift)), f->wide);
            s->extent[k] = get(parameters, 2 * (first + (k >> shift)) + 1, f->wide) - s->low[k];
        }
    } else if (f->group) {
        for (int k = 0; k < STEPS; k++) s->extent[k] = get(parameters, first + (k >> shift), f->wide);
    } else {
        for (int k = 0; k < STEPS; k++) s->extent[k] = 1;
    }
}

#define CODE(type, pointer) ((type)widened((pointer) + v * LANES))
#define EACH_VALUE(value) for (int v = 0; v < VECTORS; v++) r[v] = value * s->extent[v / 2];
#define NUMBER(code) (__builtin_convertvector(code - zero, floats) * unit)
INLINE void values_of(const Form *f, const u8 *q, const u8 *high, floats *r, const Scales *s) {
    const float unit = f->group ? 1.0f / (float)f->levels : 1.0f;
    const int zero = f->zero;
    if (f->kind == BOOK) EACH_VALUE(looked_up(f->values, CODE(integers, q)))
    else if (f->kind == E4M3) EACH_VALUE(from_e4m3(CODE(words, q)) * unit)
    else if (f->kind == E5M2) EACH_VALUE(from_e5m2(CODE(words, q)) * unit)
    else if (f->bits > 8) EACH_VALUE(NUMBER(CODE(integers, q) + (CODE(integers, high) << 8)))
    else EACH_VALUE(NUMBER(CODE(integers, q)))
    if (f->asymmetric) for (int v = 0; v < VECTORS; v++) r[v] += s->low[v / 2];
}

INLINE void decode_block(const Form *f, const u8 *codes, const void *parameters, floats *r, int64_t block) {
    u8 fields[BLOCK] __attribute__((aligned(64)));
    Scales s;
    AT(floats, s.low) = (floats){0};
    if (f->bits < 8) unpack_fields(codes, f->bits, fields);
    if (f->bits > 8) unpack_fields(codes + BLOCK, f->bits - 8, fields);
    extents_of(f, codes + 32 * f->bits, parameters, block, &s);
    values_of(f, f->bits < 8 ? fields : codes, fields, r, &s);
    if (f->rotated) for (int v = 0; v < VECTORS; v += 4) rotate(r + v, 1);
}

/* --- whole tensors ------------------------------------------------------------------------------------------------------ */
#define MEAN_AT(block) (f->mean ? f->mean + (f->start + (block) * BLOCK) % f->channels : 0)
/* of "rest" values the ones whose codes are needed */
INLINE int coded(const Form *f, int rest) { return f->rotated ? (rest + 63) / 64 * 64 : rest; }
/* what a last, smaller block has of the parameters of a whole one: where, and how many bytes */
INLINE size_t last_parameters(const Form *f, int64_t whole, int rest, size_t *place) {
    size_t width = f->wide ? 4 : 2;
    if (!f->group) return 0;
    if (f->asymmetric) width *= 2;
    *place = width * (size_t)whole * (f->fine ? 1 : (size_t)f->groups);
    return width * (f->fine ? 1 : (size_t)(coded(f, rest) + f->group - 1) / (size_t)f->group);
}

#define DEFINE(D) \
    INLINE void load_block_##D(const D *x, const float *mean, floats *r) { \
        if (mean) for (int v = 0; v < VECTORS; v++) r[v] = load_##D(x + v * LANES) - AT(const floats, mean + v * LANES); \
        else for (int v = 0; v < VECTORS; v++) r[v] = load_##D(x + v * LANES); \
    } \
    INLINE void store_block_##D(const floats *r, const float *mean, D *x) { \
        if (mean) for (int v = 0; v < VECTORS; v++) \
            store_##D(x + v * LANES, within(r[v] + AT(const floats, mean + v * LANES), as_float(MOST_##D))); \
        else for (int v = 0; v < VECTORS; v++) store_##D(x + v * LANES, r[v]); \
    } \
    int64_t encode_##D(const Form *f, const D *x, u8 *codes, void *parameters) { \
        int64_t whole = f->numel / BLOCK, size = block_bytes(f), bad = 0; \
        _Pragma("omp parallel for num_threads(f->threads) PARALLEL reduction(+ : bad)") \
        for (int64_t block = 0; block < whole; block++) { \
            floats r[VECTORS] __attribute__((aligned(64))); \
            load_block_##D(x + block * BLOCK, MEAN_AT(block), r); \
            bad += encode_block(f, r, codes + block * size, parameters, block); \
        } \
        int rest = (int)(f->numel % BLOCK); \
        if (rest) { \
            floats r[VECTORS] __attribute__((aligned(64))); \
            D padded[BLOCK] __attribute__((aligned(64))) = {0}; \
            float last[2 * STEPS]; \
            u8 packed[2 * BLOCK] __attribute__((aligned(64))); \
            size_t place = 0, stored = last_parameters(f, whole, rest, &place); \
            Form tail = *f; \
            tail.salt += (uint32_t)(whole * BLOCK) * INDEX_STEP; \
            memcpy(padded, x + whole * BLOCK, (size_t)rest * sizeof(D)); \
            load_block_##D(padded, MEAN_AT(whole), r); \
            for (int i = rest; i < BLOCK; i++) ((f32 *)r)[i] = f->mean ? 0 : ((f32 *)r)[rest - 1]; \
            bad += encode_block(&tail, r, packed, last, 0); \
            memcpy(codes + whole * size, packed, (size_t)(size == BLOCK ? coded(f, rest) : size)); \
            memcpy((char *)parameters + place, last, stored); \
        } \
        return bad; \
    } \
    void decode_##D(const Form *f, const u8 *codes, const void *parameters, D *x) { \
        int64_t whole = f->numel / BLOCK, size = block_bytes(f); \
        _Pragma("omp parallel for num_threads(f->threads) PARALLEL") \
        for (int64_t block = 0; block < whole; block++) { \
            floats r[VECTORS] __attribute__((aligned(64))); \
            decode_block(f, codes + block * size, parameters, r, block); \
            store_block_##D(r, MEAN_AT(block), x + block * BLOCK); \
        } \
        int rest = (int)(f->numel % BLOCK); \
        if (rest) { \
            floats r[VECTORS] __attribute__((aligned(64))); \
            D padded[BLOCK] __attribute__((aligned(64))); \
            float last[2 * STEPS] = {0}; \
            u8 packed[2 * BLOCK] __attribute__((aligned(64))) = {0}; \
            size_t place = 0, stored = last_parameters(f, whole, rest, &place); \
            memcpy(packed, codes + whole * size, (size_t)(size == BLOCK ? coded(f, rest) : size)); \
            memcpy(last, (const char *)parameters + place, stored); \
            decode_block(f, packed, last, r, 0); \
            store_block_##D(r, MEAN_AT(whole), padded); \
            memcpy(x + whole * BLOCK, padded, (size_t)rest * sizeof(D)); \
        } \
    } \
    /* the mean of "count" rows (a power of two, at most 64), "spacing" rows apart, added in pairs */ \
    void mean_##D(const D *x, D *mean, int64_t channels, int64_t count, int64_t spacing, int threads) { \
        int64_t stride = spacing * channels; \
        x += spacing / 2 * channels; \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1 && channels * count >= 32768)") \
        for (int64_t first = 0; first < channels; first += LANES) { \
            floats sums[64]; \
            int64_t width = channels - first < LANES ? channels - first : LANES; \
            for (int64_t row = 0; row < count; row++) { \
                D padded[LANES] = {0}; \
                const D *at = x + row * stride + first; \
                if (width < LANES) at = memcpy(padded, at, (size_t)width * sizeof(D)); \
                sums[row] = load_##D(at); \
            } \
            for (int64_t half = count / 2; half; half /= 2) \
                for (int64_t row = 0; row < half; row++) sums[row] += sums[row + half]; \
            D result[LANES]; \
            store_##D(result, sums[0] * (1.0f / (float)count)); \
            memcpy(mean + first, result, (size_t)width * sizeof(D)); \
        } \
    }

DEFINE(bf16)
DEFINE(f32)

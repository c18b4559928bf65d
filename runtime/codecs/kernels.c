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
#ifdef __AVX512BW__
#include <immintrin.h>
#elif defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2") /* with -O3 GCC 12 takes five times as long for vectors it has to split, and makes slower code */
#endif

#define INLINE static inline __attribute__((always_inline))
#define PARALLEL if (f->threads > 1 && f->numel >= 32768)
#define BLOCK 256
#define LANES 16
#define VECTORS (BLOCK / LANES)
#define STEP 32 /* the smallest group; scales are kept per step */
#define STEPS (BLOCK / STEP)
#define GANG 4
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

/* What decides which code runs, apart: the usual kinds are compiled on their own, with these as constants. */
typedef struct { int kind, fine, asymmetric, rotated, stochastic, narrow, wider; } Kind;
#define KIND_OF(f) ((Kind){(f)->kind, (f)->fine, (f)->asymmetric, (f)->rotated, (f)->stochastic, (f)->bits < 8, (f)->bits > 8})

#define MOST_bf16 0x7f7f0000u
#define MOST_f32 0x7f7fffffu
INLINE float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE words magnitudes(floats value) { return (words)value & 0x7fffffffu; }

/* what GCC 12 takes apart or makes of two instructions; the other branches say what each is */
#ifdef __AVX512BW__
INLINE words from_halves(halves v) { return (words)_mm512_cvtepu16_epi32((__m256i)v); }
INLINE words from_bytes(bytes v) { return (words)_mm512_cvtepu8_epi32((__m128i)v); }
INLINE words larger(words a, words b) { return (words)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE floats smaller(floats a, floats b) { return (floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE floats larger_float(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
/* a * signs is exact, so that fusing the sum changes nothing */
INLINE floats signed_sum(floats a, floats signs, floats other) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)signs, (__m512)other);
}
#else
INLINE words from_halves(halves v) { return __builtin_convertvector(v, words); }
INLINE words from_bytes(bytes v) { return __builtin_convertvector(__builtin_convertvector(v, halves), words); }
INLINE words larger(words a, words b) { return CHOOSE(words, (integers)(a > b), a, b); }
INLINE floats smaller(floats a, floats b) { return CHOOSE(floats, a < b, a, b); }
INLINE floats larger_float(floats a, floats b) { return CHOOSE(floats, a > b, a, b); }
INLINE floats signed_sum(floats a, floats signs, floats other) { return other + a * signs; }
#endif
INLINE floats load_bf16(const bf16 *x) { return (floats)(from_halves(AT(const halves, x)) << 16); }
INLINE floats load_f32(const f32 *x) { return AT(const floats, x); }
INLINE void store_bf16(bf16 *x, floats value) {
    words bits = (words)value;
    AT(halves, x) = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, halves);
}
INLINE void store_f32(f32 *x, floats value) { AT(floats, x) = value; }

INLINE words widened(const u8 *q) { return from_bytes(AT(const bytes, q)); }

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
#define MIX(a, signs, ...) a = signed_sum(a, signs, SWAPPED(a, __VA_ARGS__))
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
    return larger_float((floats){0} - most, smaller((floats){0} + most, value));
}
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
/* of the steps of a block, in lanes k and k + 8; "lifted": whether any lift is not 1 */
typedef struct { float low[LANES], extent[LANES], lift[LANES], factor[LANES]; int lifted; } Scales;

/* of values below 2^22 */
INLINE floats rounded_up(floats value) {
    floats whole = (value + ROUNDER) - ROUNDER;
    return whole + CHOOSE(floats, whole < value, (floats){0} + 1, (floats){0});
}
INLINE uint32_t largest_lane(words v) {
    v = larger(v, SWAPPED(v, BY1));
    v = larger(v, SWAPPED(v, BY2));
    return larger(v, SWAPPED(v, BY4))[0];
}
INLINE uint32_t lanes_set(integers mask) {
    words v = (words)mask & 1u;
    v += SWAPPED(v, BY1);
    v += SWAPPED(v, BY2);
    return (v + SWAPPED(v, BY4))[0];
}
INLINE floats up_lanes(floats value) {
    words bits = (words)value;
    return (floats)((bits + CHOOSE(words, (integers)(bits >> 31) != 0, (words){0}, (words){0} + 0xffffu)) & 0xffff0000u);
}

/* each step's scale as a share of the block's in 255ths, rounded up, and as it decodes */
INLINE floats fine_scales(floats largest, float whole, words *share) {
    const floats most = (floats){0} + FINE;
    floats part = rounded_up(largest / (whole == 0 ? 1 : whole) * FINE);
    part = smaller(part, most);
    floats more = smaller(part + 1, most);
    part = CHOOSE(floats, whole * (part * (1.0f / FINE)) < largest, more, part);
    if (whole < TINY) part = CHOOSE(floats, largest > 0, most, part);
    *share = (words)__builtin_convertvector(part, integers);
    return whole * (part * (1.0f / FINE));
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
    for (int k = 0; k < LANES; k++) {
        s->low[k] = (f->wide ? s->low[k] : -up(-s->low[k])) + 0.0f;
        s->extent[k] = (f->wide ? s->extent[k] : up(s->extent[k])) + 0.0f;
    }
}

/* scales of all steps and, stored, the parameters of all groups; the number of groups that cannot be encoded */
INLINE uint32_t scales_of(const Form *f, const Kind kind, const floats *r, void *parameters, int64_t block, Scales *s,
                          u8 *shares) {
    const int groups = f->groups, shift = f->shift, wide = f->wide;
    const uint32_t limit = kind.rotated ? ROTATED_LIMIT : INFINITE - 1;
    words peaks[STEPS], largest;
    floats extent;
    for (int k = 0; k < STEPS; k++) peaks[k] = larger(magnitudes(r[2 * k]), magnitudes(r[2 * k + 1]));
    largest = larger_of_groups(peaks, shift);
    if (kind.asymmetric) {
        ranges(f, r, s);
        for (int g = 0; g < groups; g++) {
            put(parameters, 2 * (block * groups + g), s->low[g << shift], wide);
            put(parameters, 2 * (block * groups + g) + 1, s->extent[g << shift], wide);
        }
        extent = AT(floats, s->extent) - AT(floats, s->low);
    } else if (kind.fine) {
        words share;
        uint32_t most = largest_lane(largest);
        float whole = wide ? as_float(most) : up(as_float(most));
        put(parameters, block, whole, wide);
        extent = fine_scales((floats)largest, whole, &share);
        for (int g = 0; g < groups; g++) shares[g] = (u8)share[g << shift];
    } else {
        extent = wide ? (floats)largest : up_lanes((floats)largest);
        AT(floats, s->extent) = extent;
        for (int g = 0; g < groups; g++) put(parameters, block * groups + g, s->extent[g << shift], wide);
    }
    const integers tiny = extent < TINY;
    const floats lift = CHOOSE(floats, tiny, (floats){0} + LIFT, (floats){0} + 1);
    s->lifted = lanes_set(tiny) != 0;
    AT(floats, s->lift) = lift;
    AT(floats, s->factor) = CHOOSE(floats, extent == 0, (floats){0}, (float)f->levels / (extent * lift));
    return lanes_set((integers)((largest > limit) | (magnitudes(extent) >= INFINITE))) >> shift;
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
#define EACH_SCALED(value, code) \
    for (int v = 0; v < VECTORS; v++) { \
        const int k = v / 2; \
        const floats scaled = value; \
        put_codes(code, q + v * LANES, high + v * LANES, kind.wider); \
    }
#define EACH_VECTOR(code) { \
        if (kind.asymmetric) EACH_SCALED((r[v] - s->low[k]) * s->lift[k] * s->factor[k], code) \
        else if (s->lifted) EACH_SCALED(r[v] * s->lift[k] * s->factor[k], code) \
        else EACH_SCALED(r[v] * s->factor[k], code) \
    }
INLINE void round_block(const Form *f, const Kind kind, const floats *r, const Scales *s, u8 *q, u8 *high, uint32_t index) {
    const int zero = f->zero;
    const words lanes = LANE_NUMBERS * INDEX_STEP + index;
    if (kind.kind == BOOK) EACH_VECTOR(in_book(scaled, f->thresholds))
    else if (kind.kind == E4M3) EACH_VECTOR(to_e4m3(scaled))
    else if (kind.kind == E5M2) EACH_VECTOR(to_e5m2(scaled))
    else if (kind.stochastic)
        EACH_VECTOR(stochastic(scaled, lanes + (uint32_t)(v * LANES) * INDEX_STEP, zero, f->levels))
    else EACH_VECTOR(nearest(scaled, zero))
}

INLINE int block_bytes(const Form *f) { return 32 * f->bits + (f->fine ? f->groups : 0); }

INLINE void rotate_block(floats *r, float unit) {
    for (int v = 0; v < VECTORS; v += 4) rotate(r + v, unit);
}
/* the number of groups that cannot be encoded */
INLINE uint32_t scale_block(const Form *f, const Kind kind, const floats *r, u8 *codes, void *parameters, int64_t block,
                            Scales *s) {
    if (f->group) return scales_of(f, kind, r, parameters, block, s, codes + 32 * f->bits);
    words most = {0};
    uint32_t bad = 0;
    for (int v = 0; v < VECTORS; v++) most = larger(most, magnitudes(r[v]));
    for (int i = 0; i < LANES; i++) bad |= most[i] > as_bits((float)f->levels);
    for (int k = 0; k < STEPS; k++) s->factor[k] = 1;
    s->lifted = 0;
    return bad;
}

/* "count" blocks of values, up to GANG: stage after stage for all of them, so that one's waiting is another's work */
INLINE int64_t encode_gang(const Form *f, const Kind kind, floats (*r)[VECTORS], u8 *codes, void *parameters,
                           int64_t block, int count) {
    const int size = block_bytes(f);
    Scales s[GANG];
    u8 low[GANG][BLOCK] __attribute__((aligned(64))), high[GANG][BLOCK] __attribute__((aligned(64)));
    uint32_t bad[GANG];
    int64_t all = 0;
    if (kind.rotated) for (int i = 0; i < count; i++) rotate_block(r[i], 1.0f / 64);
    for (int i = 0; i < count; i++) {
        bad[i] = scale_block(f, kind, r[i], codes + i * size, parameters, block + i, s + i);
        all += bad[i];
    }
    for (int i = 0; i < count; i++) {
        const uint32_t index = f->salt + (uint32_t)((block + i) * BLOCK) * INDEX_STEP;
        round_block(f, kind, r[i], s + i, kind.narrow ? low[i] : codes + i * size, high[i], index);
    }
    for (int i = 0; i < count; i++) {
        if (kind.narrow) pack_fields(low[i], f->bits, codes + i * size);
        if (kind.wider) pack_fields(high[i], f->bits - 8, codes + i * size + BLOCK);
    }
    if (all) for (int i = 0; i < count; i++) if (bad[i]) memset(codes + i * size, 0, (size_t)size);
    return all;
}

/* --- and back ------------------------------------------------------------------------------------------------------- */
INLINE void extents_of(const Form *f, const Kind kind, const u8 *shares, const void *parameters, int64_t block, Scales *s) {
    const int64_t first = block * f->groups;
    const int shift = f->shift;
    if (kind.fine) {
        const float whole = get(parameters, block, f->wide);
        for (int k = 0; k < STEPS; k++) s->extent[k] = whole * ((float)(int32_t)shares[k >> shift] * (1.0f / FINE));
    } else if (kind.asymmetric) {
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
INLINE void values_of(const Form *f, const Kind kind, const u8 *q, const u8 *high, floats *r, const Scales *s) {
    const float unit = f->group ? 1.0f / (float)f->levels : 1.0f;
    const int zero = f->zero;
    if (kind.kind == BOOK) EACH_VALUE(looked_up(f->values, CODE(integers, q)))
    else if (kind.kind == E4M3) EACH_VALUE(from_e4m3(CODE(words, q)) * unit)
    else if (kind.kind == E5M2) EACH_VALUE(from_e5m2(CODE(words, q)) * unit)
    else if (kind.wider) EACH_VALUE(NUMBER(CODE(integers, q) + (CODE(integers, high) << 8)))
    else EACH_VALUE(NUMBER(CODE(integers, q)))
    if (kind.asymmetric) for (int v = 0; v < VECTORS; v++) r[v] += s->low[v / 2];
}

INLINE void decode_block(const Form *f, const Kind kind, const u8 *codes, const void *parameters, floats *r, int64_t block) {
    u8 fields[BLOCK] __attribute__((aligned(64)));
    Scales s;
    AT(floats, s.low) = (floats){0};
    if (kind.narrow) unpack_fields(codes, f->bits, fields);
    if (kind.wider) unpack_fields(codes + BLOCK, f->bits - 8, fields);
    extents_of(f, kind, codes + 32 * f->bits, parameters, block, &s);
    values_of(f, kind, kind.narrow ? fields : codes, fields, r, &s);
    if (kind.rotated) rotate_block(r, 1);
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

/* integers with a scale per group, rounded to nearest, 8 bits or fewer: on their own; all else as it is asked for */
#define USUAL(call, fine, rotated, narrow) { const Kind kind = {INT, fine, 0, rotated, 0, narrow, 0}; call; }
#define EACH_KIND(call) \
    if (f->kind != INT || !f->group || f->asymmetric || f->stochastic || f->bits > 8) { const Kind kind = KIND_OF(f); call; } \
    else if (f->bits == 8) { \
        if (f->fine) { if (f->rotated) USUAL(call, 1, 1, 0) else USUAL(call, 1, 0, 0) } \
        else { if (f->rotated) USUAL(call, 0, 1, 0) else USUAL(call, 0, 0, 0) } \
    } else { \
        if (f->fine) { if (f->rotated) USUAL(call, 1, 1, 1) else USUAL(call, 1, 0, 1) } \
        else { if (f->rotated) USUAL(call, 0, 1, 1) else USUAL(call, 0, 0, 1) } \
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
    INLINE int64_t encode_blocks_##D(const Form *f, const Kind kind, const D *x, u8 *codes, void *parameters) { \
        int64_t whole = f->numel / BLOCK, size = block_bytes(f), bad = 0; \
        _Pragma("omp parallel for num_threads(f->threads) PARALLEL reduction(+ : bad)") \
        for (int64_t block = 0; block < whole; block += GANG) { \
            const int count = whole - block < GANG ? (int)(whole - block) : GANG; \
            floats r[GANG][VECTORS] __attribute__((aligned(64))); \
            for (int i = 0; i < count; i++) load_block_##D(x + (block + i) * BLOCK, MEAN_AT(block + i), r[i]); \
            bad += encode_gang(f, kind, r, codes + block * size, parameters, block, count); \
        } \
        return bad; \
    } \
    int64_t encode_##D(const Form *f, const D *x, u8 *codes, void *parameters) { \
        int64_t whole = f->numel / BLOCK, size = block_bytes(f), bad = 0; \
        EACH_KIND(bad = encode_blocks_##D(f, kind, x, codes, parameters)) \
        int rest = (int)(f->numel % BLOCK); \
        if (rest) { \
            floats r[1][VECTORS] __attribute__((aligned(64))); \
            D padded[BLOCK] __attribute__((aligned(64))) = {0}; \
            float last[2 * STEPS]; \
            u8 packed[2 * BLOCK] __attribute__((aligned(64))); \
            size_t place = 0, stored = last_parameters(f, whole, rest, &place); \
            Form tail = *f; \
            tail.salt += (uint32_t)(whole * BLOCK) * INDEX_STEP; \
            memcpy(padded, x + whole * BLOCK, (size_t)rest * sizeof(D)); \
            load_block_##D(padded, MEAN_AT(whole), r[0]); \
            for (int i = rest; i < BLOCK; i++) ((f32 *)r)[i] = f->mean ? 0 : ((f32 *)r)[rest - 1]; \
            bad += encode_gang(&tail, KIND_OF(f), r, packed, last, 0, 1); \
            memcpy(codes + whole * size, packed, (size_t)(size == BLOCK ? coded(f, rest) : size)); \
            memcpy((char *)parameters + place, last, stored); \
        } \
        return bad; \
    } \
    INLINE void decode_blocks_##D(const Form *f, const Kind kind, const u8 *codes, const void *parameters, D *x) { \
        int64_t whole = f->numel / BLOCK, size = block_bytes(f); \
        _Pragma("omp parallel for num_threads(f->threads) PARALLEL") \
        for (int64_t block = 0; block < whole; block++) { \
            floats r[VECTORS] __attribute__((aligned(64))); \
            decode_block(f, kind, codes + block * size, parameters, r, block); \
            store_block_##D(r, MEAN_AT(block), x + block * BLOCK); \
        } \
    } \
    void decode_##D(const Form *f, const u8 *codes, const void *parameters, D *x) { \
        int64_t whole = f->numel / BLOCK, size = block_bytes(f); \
        EACH_KIND(decode_blocks_##D(f, kind, codes, parameters, x)) \
        int rest = (int)(f->numel % BLOCK); \
        if (rest) { \
            floats r[VECTORS] __attribute__((aligned(64))); \
            D padded[BLOCK] __attribute__((aligned(64))); \
            float last[2 * STEPS] = {0}; \
            u8 packed[2 * BLOCK] __attribute__((aligned(64))) = {0}; \
            size_t place = 0, stored = last_parameters(f, whole, rest, &place); \
            memcpy(packed, codes + whole * size, (size_t)(size == BLOCK ? coded(f, rest) : size)); \
            memcpy(last, (const char *)parameters + place, stored); \
            decode_block(f, KIND_OF(f), packed, last, r, 0); \
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

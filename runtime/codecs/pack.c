/* bfloat16 in 12.25 bits and a short list, bit for bit; pack.py says how it is laid out and the tests compare both. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE4_1__
#include <immintrin.h>
#endif

#define GROUP 32
#define GROUP_BYTES 49
#define WINDOW 15
#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8;
typedef uint16_t u16;
/* Half a group: 32 bytes, which compilers handle well with AVX2 as with AVX-512. */
typedef u16 halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef u16 quarters __attribute__((vector_size(16), aligned(2), may_alias));
typedef u8 bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef union { halves all; quarters part[2]; uint64_t words[4]; } Half;
typedef struct { int32_t *places; u16 *values; int64_t room, count; } Missed;
#define AT(type, pointer) (*(type *)(pointer))
#define LANES (GROUP / 2)
#define LARGER(type, a, b) (((a) & (type)((a) > (b))) | ((b) & ~(type)((a) > (b))))

INLINE u16 largest(halves exponents) {
    Half half = {exponents};
    quarters top = LARGER(quarters, half.part[0], half.part[1]);
#ifdef __SSE4_1__
    return (u16)~_mm_extract_epi16(_mm_minpos_epu16((__m128i)~top), 0);
#else
    u16 found = 0;
    for (int i = 0; i < 8; i++) found = top[i] > found ? top[i] : found;
    return found;
#endif
}

INLINE halves code_of(halves exponents, u16 top, Half *missed) {
    halves back = top - exponents, fits = (halves)(back < WINDOW), any = (halves)(exponents != 0);
    missed->all |= any & ~fits;
    return (WINDOW - back) & fits & any;
}

INLINE bytes low_byte(halves x) { return __builtin_convertvector((x >> 8 & 0x80) | (x & 0x7f), bytes); }

/* Whether an element's exponent lies below the window. */
INLINE int pack_group(const u16 *x, u8 *out) {
    halves first = AT(const halves, x), second = AT(const halves, x + LANES);
    halves e = first >> 7 & 0xff, f = second >> 7 & 0xff;
    u16 top = largest(LARGER(halves, e, f));
    Half missed = {{0}};
    halves codes = code_of(e, top, &missed) | code_of(f, top, &missed) << 4;
    out[0] = (u8)top;
    AT(bytes, out + 1) = low_byte(first);
    AT(bytes, out + 1 + LANES) = low_byte(second);
    AT(bytes, out + 1 + GROUP) = __builtin_convertvector(codes, bytes);
    return (missed.words[0] | missed.words[1] | missed.words[2] | missed.words[3]) != 0;
}

static void note_missed(const u16 *x, int64_t first, int64_t size, Missed *missed) {
    u16 top = 0;
    for (int i = 0; i < size; i++) top = (x[i] >> 7 & 0xff) > top ? (u16)(x[i] >> 7 & 0xff) : top;
    for (int i = 0; i < size; i++) {
        u16 exponent = x[i] >> 7 & 0xff;
        if (!exponent || top - exponent < WINDOW) continue;
        if (missed->count < missed->room) {
            missed->places[missed->count] = (int32_t)(first + i);
            missed->values[missed->count] = x[i];
        }
        missed->count++;
    }
}

static void pack_part(const u16 *x, int64_t numel, int64_t first, int64_t last, u8 *codes, Missed *missed) {
    for (int64_t group = first; group < last && missed->count <= missed->room; group++) {
        int64_t at = group * GROUP, size = numel - at < GROUP ? numel - at : GROUP;
        u16 padded[GROUP] = {0};
        const u16 *from = size < GROUP ? memcpy(padded, x + at, (size_t)size * sizeof(u16)) : x + at;
        if (pack_group(from, codes + group * GROUP_BYTES)) note_missed(from, at, size, missed);
    }
}

/* How many elements the list holds, in order; more than its room where it is too short. -1: no memory. */
int64_t pack_bf16(const u16 *x, int64_t numel, u8 *codes, int32_t *places, u16 *values, int64_t room, int threads) {
    int64_t groups = (numel + GROUP - 1) / GROUP, parts = threads > 1 && numel >= 32768 ? threads : 1;
    Missed *missed = calloc((size_t)parts, sizeof(Missed));
    if (!missed) return -1;
    missed[0] = (Missed){places, values, room, 0};
    int64_t short_of_memory = 0, count = 0;
    for (int64_t part = 1; part < parts; part++) {
        missed[part] = (Missed){malloc((size_t)room * sizeof(int32_t)), malloc((size_t)room * sizeof(u16)), room, 0};
        short_of_memory |= room && (!missed[part].places || !missed[part].values);
    }
    if (!short_of_memory) {
        #pragma omp parallel for num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; part++)
            pack_part(x, numel, groups * part / parts, groups * (part + 1) / parts, codes, &missed[part]);
        for (int64_t part = 0; part < parts; part++) {
            if (part && count + missed[part].count <= room) {
                memcpy(places + count, missed[part].places, (size_t)missed[part].count * sizeof(int32_t));
                memcpy(values + count, missed[part].values, (size_t)missed[part].count * sizeof(u16));
            }
            count += missed[part].count;
        }
        /* The rest of the list says again what the first element is. */
        for (int64_t i = count; i < room; i++) places[i] = 0, values[i] = x[0];
    }
    for (int64_t part = 1; part < parts; part++) free(missed[part].places), free(missed[part].values);
    free(missed);
    return short_of_memory ? -1 : count;
}

INLINE halves value_of(u16 base, halves codes, halves low) {
    halves exponents = (base + codes) & 0xff & (halves)(codes != 0);
    return (low & 0x80) << 8 | exponents << 7 | (low & 0x7f);
}

INLINE void unpack_group(const u8 *in, u16 *x) {
    u16 base = (u16)(in[0] - WINDOW);
    halves codes = __builtin_convertvector(AT(const bytes, in + 1 + GROUP), halves);
    halves first = __builtin_convertvector(AT(const bytes, in + 1), halves);
    halves second = __builtin_convertvector(AT(const bytes, in + 1 + LANES), halves);
    AT(halves, x) = value_of(base, codes & 15, first);
    AT(halves, x + LANES) = value_of(base, codes >> 4, second);
}

void unpack_bf16(const u8 *codes, const int32_t *places, const u16 *values, int64_t room, int64_t numel, u16 *x, int threads) {
    int64_t whole = numel / GROUP, rest = numel % GROUP;
    #pragma omp parallel for num_threads(threads) if (threads > 1 && numel >= 32768)
    for (int64_t group = 0; group < whole; group++) unpack_group(codes + group * GROUP_BYTES, x + group * GROUP);
    if (rest) {
        u16 padded[GROUP];
        unpack_group(codes + whole * GROUP_BYTES, padded);
        memcpy(x + whole * GROUP, padded, (size_t)rest * sizeof(u16));
    }
    for (int64_t i = 0; i < room; i++) x[places[i]] = values[i];
}

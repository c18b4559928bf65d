/* Rotary embedding of q and k, forward and backward, one pass each; rotaryops.py's formulas bit for bit (the tests
 * compare them). Each operator of those rounds to the tensors' own type, and so does every line here.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define PARALLEL if (r->threads > 1 && (r->q_heads + r->k_heads) * r->batches * r->tokens * r->width >= 32768)

typedef uint16_t bf16;
typedef float f32;
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

/* rotaryops.py's _Rotary has the same fields. Strides in elements, of batch, head and token; of batch and token. */
typedef struct {
    const void *q, *k, *cos, *sin;
    void *q_out, *k_out;
    int64_t batches, tokens, width, q_heads, k_heads, threads;
    int64_t q_by[3], k_by[3], q_out_by[3], k_out_by[3], cos_by[2], sin_by[2];
} Rotary;

/* A NaN that comes from bfloat16 or from an invalid operation has no low bits that could carry it away. */
#ifdef __AVX512BW__
INLINE words up(words bits) {
    __m512i x = (__m512i)bits, up = _mm512_add_epi32(x, _mm512_set1_epi32(0x7fff));
    __mmask16 odd = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x10000));
    return (words)_mm512_mask_sub_epi32(up, odd, up, _mm512_set1_epi32(-1));
}
INLINE floats load_bf16(const bf16 *x) {
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)), 16);
}
INLINE void store_bf16(bf16 *x, floats value) {
    _mm256_storeu_si256((void *)x, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)up((words)value), 16)));
}
#else
INLINE words up(words bits) { return bits + 0x7fffu + ((bits >> 16) & 1u); }
INLINE floats load_bf16(const bf16 *x) { return (floats)(__builtin_convertvector(*(const halves *)x, words) << 16); }
INLINE void store_bf16(bf16 *x, floats value) { *(halves *)x = __builtin_convertvector(up((words)value) >> 16, halves); }
#endif
INLINE floats rounded_bf16(floats value) { return (floats)(up((words)value) & 0xffff0000u); }
INLINE floats load_f32(const f32 *x) { return *(const floats *)x; }
INLINE void store_f32(f32 *x, floats value) { *(floats *)x = value; }
INLINE floats rounded_f32(floats value) { return value; }

#define DEFINE(D) \
    /* LANES elements of both halves of a row, of every head. The rest of a row is shorter: through a padded copy. */ \
    INLINE void column_##D(const D *x, D *out, int64_t by, int64_t out_by, int64_t heads, int64_t half, const floats *cos, \
                           const floats *sin, int lanes, int backward) { \
        for (int64_t head = 0; head < heads; head++, x += by, out += out_by) { \
            D padded[4][LANES] = {{0}}; \
            const D *at[2] = {x, x + half}; \
            D *to[2] = {out, out + half}; \
            if (lanes < LANES) for (int i = 0; i < 2; i++) \
                at[i] = memcpy(padded[i], at[i], (size_t)lanes * sizeof(D)), to[i] = padded[2 + i]; \
            const floats low = load_##D(at[0]), high = load_##D(at[1]); \
            floats of_low, of_high; \
            if (backward) { \
                /* + 0: autograd adds up gradients of slices, filled up with zeros */ \
                of_low = rounded_##D(high * sin[1]) + 0.0f; \
                of_high = rounded_##D(low * -sin[0]) + 0.0f; \
            } else { \
                of_low = rounded_##D(high * -sin[0]); \
                of_high = rounded_##D(low * sin[1]); \
            } \
            store_##D(to[0], rounded_##D(low * cos[0]) + of_low); \
            store_##D(to[1], rounded_##D(high * cos[1]) + of_high); \
            if (lanes < LANES) for (int i = 0; i < 2; i++) memcpy(out + i * half, to[i], (size_t)lanes * sizeof(D)); \
        } \
    } \
    INLINE void part_##D(const Rotary *r, int64_t batch, int64_t token, int64_t first, int lanes, int backward) { \
        const int64_t half = r->width / 2; \
        const D *c = (const D *)r->cos + batch * r->cos_by[0] + token * r->cos_by[1] + first; \
        const D *s = (const D *)r->sin + batch * r->sin_by[0] + token * r->sin_by[1] + first; \
        const D *q = (const D *)r->q + batch * r->q_by[0] + token * r->q_by[2] + first; \
        const D *k = (const D *)r->k + batch * r->k_by[0] + token * r->k_by[2] + first; \
        D *q_out = (D *)r->q_out + batch * r->q_out_by[0] + token * r->q_out_by[2] + first; \
        D *k_out = (D *)r->k_out + batch * r->k_out_by[0] + token * r->k_out_by[2] + first; \
        floats cos[2], sin[2]; \
        for (int i = 0; i < 2; i++) { \
            D padded[2][LANES] = {{0}}; \
            const D *c_at = c + i * half, *s_at = s + i * half; \
            if (lanes < LANES) { \
                c_at = memcpy(padded[0], c_at, (size_t)lanes * sizeof(D)); \
                s_at = memcpy(padded[1], s_at, (size_t)lanes * sizeof(D)); \
            } \
            cos[i] = load_##D(c_at), sin[i] = load_##D(s_at); \
        } \
        column_##D(q, q_out, r->q_by[1], r->q_out_by[1], r->q_heads, half, cos, sin, lanes, backward); \
        column_##D(k, k_out, r->k_by[1], r->k_out_by[1], r->k_heads, half, cos, sin, lanes, backward); \
    } \
    INLINE void all_##D(const Rotary *r, int backward) { \
        const int64_t whole = r->width / 2 / LANES * LANES; \
        const int rest = (int)(r->width / 2 - whole); \
        _Pragma("omp parallel for num_threads(r->threads) PARALLEL") \
        for (int64_t row = 0; row < r->batches * r->tokens; row++) { \
            const int64_t batch = row / r->tokens, token = row % r->tokens; \
            for (int64_t first = 0; first < whole; first += LANES) part_##D(r, batch, token, first, LANES, backward); \
            if (rest) part_##D(r, batch, token, whole, rest, backward); \
        } \
    } \
    void rotary_##D(const Rotary *r) { all_##D(r, 0); } \
    void rotary_backward_##D(const Rotary *r) { all_##D(r, 1); }

DEFINE(bf16)
DEFINE(f32)

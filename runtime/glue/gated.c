/* The gated product of an MLP in bfloat16, silu(gate) * up, and its gradients, each in one pass; gatedops.py says where
 * it runs and compares it with torch before that.
 *
 * Bits are those of torch's vectors. exp is computed as SLEEF's expf of 1.0 ulp does (range reduction, polynomial and
 * its coefficients: https://sleef.org, Boost Software License 1.0), since torch calls that; each rounding to bfloat16
 * that torch's separate operators make is made here; NaN becomes 0xffff. Compiled without contraction: fused
 * multiply-adds stand where they are written. x times sigmoid(x) rounds to the bfloat16 that x / (1 + exp(-x)) does,
 * for each of the 65,536.
 */
#include <stdint.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define VECTORS 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* else GCC forgets restrict */
#define BLOCK 64
#define PIECE 4096
#define PARALLEL _Pragma("omp parallel for num_threads(threads) if (threads > 1 && numel > 32768)")
#define LOG2_E 1.442695040888963407359924681001892137426645954152985934135449406931f
#define LN2_HIGH 0.693145751953125f
#define LN2_LOW 1.428606765330187045e-06f
#define LIMIT 110.0f /* exp is 0 or infinite beyond */
/* exp(s) - 1 - s over s * s. */
#define SERIES(fma, all, s) \
    fma(fma(fma(fma(fma(all(0.000198527617612853646278381f), s, all(0.00139304355252534151077271f)), s, \
        all(0.00833336077630519866943359f)), s, all(0.0416664853692054748535156f)), s, \
        all(0.166666671633720397949219f)), s, all(0.5f))

typedef uint16_t bf16;
typedef union { float number; uint32_t word; } Single;

/* Without such instructions these loops would call a library function for each element. */
int gated_has_fma(void) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return 1;
#else
    return 0;
#endif
}

INLINE float widened(bf16 x) { return (Single){.word = (uint32_t)x << 16}.number; }

/* The nearest bfloat16 in the upper half. */
INLINE uint32_t nearest(uint32_t word) { return word + 0x7fff + (word >> 16 & 1); }

INLINE bf16 narrowed(float x) { return (bf16)(x != x ? 0xffff : nearest((Single){x}.word) >> 16); }

/* NaN stays NaN: those met here have an empty lower half. */
INLINE float rounded(float x) { return (Single){.word = nearest((Single){x}.word) & 0xffff0000}.number; }

INLINE float exp_of_minus(float x) {
    float d = -x;
    d = d > LIMIT ? LIMIT : d;
    d = d < -LIMIT ? -LIMIT : d;
    float q = __builtin_rintf(d * LOG2_E);
    float s = __builtin_fmaf(q, -LN2_LOW, __builtin_fmaf(q, -LN2_HIGH, d));
    float sum = 1.0f + __builtin_fmaf(s * s, SERIES(__builtin_fmaf, , s), s);
    int32_t power = (int32_t)q, half = power >> 1; /* two factors: a subnormal result is rounded once, at the second */
    return sum * (Single){.word = (uint32_t)(half + 127) << 23}.number
               * (Single){.word = (uint32_t)(power - half + 127) << 23}.number;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_of_minus(x)); }

APART void product_of_any(
    const bf16 *restrict gate, const bf16 *restrict up, bf16 *restrict out, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        float x = widened(gate[i]);
        out[i] = narrowed(rounded(x * sigmoid(x)) * widened(up[i]));
    }
}

APART void gradients_of_any(
    const bf16 *restrict grad, const bf16 *restrict gate, const bf16 *restrict up, bf16 *restrict gate_grad,
    bf16 *restrict up_grad, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        float x = widened(gate[i]), g = widened(grad[i]), s = sigmoid(x);
        gate_grad[i] = narrowed(rounded(g * widened(up[i])) * s * (1.0f + x * (1.0f - s)));
        up_grad[i] = narrowed(g * rounded(x * s));
    }
}

#ifdef VECTORS
#define LANES 16
#define PARTS (BLOCK / LANES)
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)
#define ALL(x) _mm512_set1_ps(x)
#define WORDS(x) _mm512_set1_epi32((int)(x))

/* A lane that `store` gets wrong: NaN, and subnormal numbers where the machine's own conversion takes them for 0. A block
 * with one is computed again element by element. */
#ifdef __AVX512BF16__
#define IS_ODD(x) _mm512_fpclass_ps_mask(x, 0xa1)
#else
#define IS_ODD(x) _mm512_fpclass_ps_mask(x, 0x81)
#endif

INLINE __m512 load(const bf16 *x) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE __m512i nearest_all(__m512 x) {
    __m512i words = _mm512_castps_si512(x), down = _mm512_add_epi32(words, WORDS(0x7fff));
    return _mm512_mask_add_epi32(down, _mm512_test_epi32_mask(words, WORDS(0x10000)), words, WORDS(0x8000));
}

INLINE __m512 round_all(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(nearest_all(x), WORDS(0xffff0000)));
}

INLINE void store(bf16 *out, __m512 first, __m512 second) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
    static const bf16 upper[2 * LANES] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    __m512i places = _mm512_loadu_si512(upper);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(nearest_all(first), places, nearest_all(second)));
#endif
}

/* Here s is worked out from x itself instead of from -x, with the signs of its terms turned. */
INLINE __m512 sigmoid_all(__m512 x) {
    __m512 near = _mm512_range_ps(x, ALL(LIMIT), 2); /* the smaller magnitude, with the sign of x */
    __m512 q = _mm512_roundscale_ps(_mm512_mul_ps(near, ALL(-LOG2_E)), 0);
    __m512 s = _mm512_fmadd_ps(q, ALL(-LN2_LOW), _mm512_fnmsub_ps(q, ALL(LN2_HIGH), near));
    __m512 sum = _mm512_fmadd_ps(_mm512_mul_ps(s, s), SERIES(_mm512_fmadd_ps, ALL, s), s);
    return _mm512_div_ps(ALL(1.0f), _mm512_add_ps(ALL(1.0f), _mm512_scalef_ps(_mm512_add_ps(ALL(1.0f), sum), q)));
}

INLINE void block_product(const bf16 *gate, const bf16 *up, bf16 *out) {
    __m512 product[PARTS];
    __mmask16 odd = 0;
    EACH_PART {
        __m512 x = load(gate + i * LANES);
        product[i] = _mm512_mul_ps(round_all(_mm512_mul_ps(x, sigmoid_all(x))), load(up + i * LANES));
        odd |= IS_ODD(product[i]);
    }
    if (__builtin_expect(odd, 0)) {
        product_of_any(gate, up, out, BLOCK);
        return;
    }
    for (int i = 0; i < PARTS; i += 2) store(out + i * LANES, product[i], product[i + 1]);
}

INLINE void block_gradients(const bf16 *grad, const bf16 *gate, const bf16 *up, bf16 *gate_grad, bf16 *up_grad) {
    __m512 for_gate[PARTS], for_up[PARTS];
    __mmask16 odd = 0;
    EACH_PART {
        __m512 x = load(gate + i * LANES), g = load(grad + i * LANES), s = sigmoid_all(x), one = ALL(1.0f);
        __m512 of_act = round_all(_mm512_mul_ps(g, load(up + i * LANES)));
        __m512 slope = _mm512_add_ps(one, _mm512_mul_ps(x, _mm512_sub_ps(one, s)));
        for_gate[i] = _mm512_mul_ps(_mm512_mul_ps(of_act, s), slope);
        for_up[i] = _mm512_mul_ps(g, round_all(_mm512_mul_ps(x, s)));
        odd |= IS_ODD(for_gate[i]) | IS_ODD(for_up[i]);
    }
    if (__builtin_expect(odd, 0)) {
        gradients_of_any(grad, gate, up, gate_grad, up_grad, BLOCK);
        return;
    }
    for (int i = 0; i < PARTS; i += 2) {
        store(gate_grad + i * LANES, for_gate[i], for_gate[i + 1]);
        store(up_grad + i * LANES, for_up[i], for_up[i + 1]);
    }
}

INLINE void piece_product(const bf16 *gate, const bf16 *up, bf16 *out, int64_t numel) {
    for (int64_t at = 0; at < numel; at += BLOCK) block_product(gate + at, up + at, out + at);
}

INLINE void piece_gradients(
    const bf16 *grad, const bf16 *gate, const bf16 *up, bf16 *gate_grad, bf16 *up_grad, int64_t numel) {
    for (int64_t at = 0; at < numel; at += BLOCK)
        block_gradients(grad + at, gate + at, up + at, gate_grad + at, up_grad + at);
}
#else
#define piece_product product_of_any
#define piece_gradients gradients_of_any
#endif

/* Results share no memory with anything; numel is a multiple of BLOCK. */
void gated_product_bf16(const bf16 *gate, const bf16 *up, bf16 *out, int64_t numel, int threads) {
    (void)threads;
    PARALLEL
    for (int64_t at = 0; at < numel; at += PIECE)
        piece_product(gate + at, up + at, out + at, numel - at < PIECE ? numel - at : PIECE);
}

void gated_gradients_bf16(
    const bf16 *grad, const bf16 *gate, const bf16 *up, bf16 *gate_grad, bf16 *up_grad, int64_t numel, int threads) {
    (void)threads;
    PARALLEL
    for (int64_t at = 0; at < numel; at += PIECE)
        piece_gradients(
            grad + at, gate + at, up + at, gate_grad + at, up_grad + at, numel - at < PIECE ? numel - at : PIECE);
}

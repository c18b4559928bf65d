/* The elementwise parts of RMSNorm, forward and backward, one pass over memory each (rmsnorm.py has the rest).
 *
 * Each step rounds where torch's own operators round: to bfloat16 wherever those write a bfloat16 tensor, to float32
 * elsewhere. Compiled without contraction or reassociation, so that bits are those of the operators one by one.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define FEW 32768 /* elements below which threads cost more than they save */

typedef uint16_t bf16;
typedef float f32;
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));
#define AT(type, pointer) (*(type *)(pointer))

/* normops.py's _Rows has the same fields. Rows in up to three dimensions, each operand with strides (in elements) of
 * its own; a row's elements lie side by side. */
typedef struct {
    int64_t sizes[3], width, threads;
    int64_t grad[3], x[3], inverse[3], of_square[3], out[3];
} Rows;

typedef struct { int64_t at[3]; } Row;

INLINE Row row_of(const Rows *f, int64_t number) {
    int64_t others = number / f->sizes[2];
    return (Row){{others / f->sizes[1], others % f->sizes[1], number % f->sizes[2]}};
}

INLINE int64_t place(Row row, const int64_t strides[3]) {
    return row.at[0] * strides[0] + row.at[1] * strides[1] + row.at[2] * strides[2];
}

INLINE int64_t rows_in(const Rows *f) { return f->sizes[0] * f->sizes[1] * f->sizes[2]; }

/* STATEMENT for every vector of a row: n elements from i on. */
#define EACH_VECTOR(width, STATEMENT) do { \
    int64_t i = 0; \
    for (; i + LANES <= (width); i += LANES) { const int64_t n = LANES; STATEMENT; } \
    if (i < (width)) { const int64_t n = (width) - i; STATEMENT; } \
} while (0)

INLINE floats load_f32(const f32 *p, int64_t n) {
    if (n == LANES) return AT(const floats, p);
    floats v = {0};
    memcpy(&v, p, (size_t)n * sizeof(f32));
    return v;
}

INLINE void store_f32(f32 *p, floats v, int64_t n) { memcpy(p, &v, (size_t)n * sizeof(f32)); }
INLINE floats round_f32(floats v) { return v; }

INLINE floats load_bf16(const bf16 *p, int64_t n) {
    halves v = {0};
    memcpy(&v, p, (size_t)n * sizeof(bf16));
#ifdef __AVX512BW__
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (floats)(__builtin_convertvector(v, words) << 16);
#endif
}

/* The nearest bfloat16, ties to even, in the upper halves; the lower ones are not cleared. A NaN stays one: here it comes
 * from a bfloat16 or from the processor, so that its lower half is zero and carries nothing over. */
INLINE words rounded(floats v) {
    words bits = (words)v;
    return bits + (bits >> 16 & 1u) + 0x7fffu;
}

INLINE floats round_bf16(floats v) { return (floats)(rounded(v) & 0xffff0000u); }

INLINE void store_bf16(bf16 *p, floats v, int64_t n) {
#ifdef __AVX512BW__
    halves y = (halves)_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded(v), 16));
#else
    halves y = __builtin_convertvector(rounded(v) >> 16, halves);
#endif
    memcpy(p, &y, (size_t)n * sizeof(bf16));
}

#define FOR_ROWS(f) \
    int64_t rows = rows_in(f), width = f->width; \
    int threads = (int)f->threads; \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)") \
    for (int64_t number = 0; number < rows; number++)

#define KERNELS(T) \
void rms_square_##T(const Rows *f, const T *x, f32 *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *a = x + place(row, f->x); \
        f32 *y = out + place(row, f->out); \
        EACH_VECTOR(width, floats h = load_##T(a + i, n); store_f32(y + i, h * h, n)); \
    } \
} \
void rms_scale_##T(const Rows *f, const T *x, const f32 *inverse, const T *weight, T *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *a = x + place(row, f->x); \
        T *y = out + place(row, f->out); \
        f32 factor = inverse[place(row, f->inverse)]; \
        EACH_VECTOR(width, \
            floats normed = round_##T(load_##T(a + i, n) * factor); \
            store_##T(y + i, load_##T(weight + i, n) * normed, n)); \
    } \
} \
void rms_product_##T(const Rows *f, const T *grad, const T *x, const T *weight, f32 *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *g = grad + place(row, f->grad), *a = x + place(row, f->x); \
        f32 *y = out + place(row, f->out); \
        EACH_VECTOR(width, \
            floats weighted = round_##T(load_##T(g + i, n) * load_##T(weight + i, n)); \
            store_f32(y + i, weighted * load_##T(a + i, n), n)); \
    } \
} \
void rms_gradient_##T(const Rows *f, const T *grad, const T *x, const T *weight, const f32 *inverse, const f32 *of_square, \
                      T *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *g = grad + place(row, f->grad), *a = x + place(row, f->x); \
        T *y = out + place(row, f->out); \
        f32 factor = inverse[place(row, f->inverse)], through = of_square[place(row, f->of_square)]; \
        EACH_VECTOR(width, \
            floats weighted = round_##T(load_##T(g + i, n) * load_##T(weight + i, n)); \
            store_##T(y + i, weighted * factor + through * (load_##T(a + i, n) * 2.0f), n)); \
    } \
}
KERNELS(bf16)
KERNELS(f32)

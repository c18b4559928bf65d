/* Group codecs for CPU in one pass each; equal to reference.py bit for bit (tests/test_codecs.py compares them).
 *
 * encode_<kind>_<dtype>(values, codes, peaks, numel, group, threads) returns the number of groups that hold a NaN or
 * an infinity (their codes are zeros). decode_<kind>_<dtype>(codes, peaks, values, numel, group, threads).
 * A group's magnitudes are compared as integers: for positive floats the order is the same, and NaN is the largest.
 * Compiled without contraction or reassociation: the results are those of IEEE single precision.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PARALLEL_FROM 32768

INLINE float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

typedef uint16_t bf16;
typedef uint32_t f32;
#define MAGNITUDE_bf16 0x7fffu
#define MAGNITUDE_f32 0x7fffffffu
#define INFINITY_bf16 0x7f80u
#define INFINITY_f32 0x7f800000u
INLINE float load_bf16(bf16 value) { return as_float((uint32_t)value << 16); }
INLINE float load_f32(f32 value) { return as_float(value); }
INLINE bf16 store_bf16(float value) {
    uint32_t bits = as_bits(value);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
INLINE f32 store_f32(float value) { return as_bits(value); }

/* e4m3 of a value of magnitude at most 448, ties to even; below 2^-6 the spacing is 2^-9: adding 2^14 rounds to it */
INLINE uint8_t to_e4m3(float value) {
    uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - 960u;
    uint32_t small = as_bits(as_float(magnitude) + 16384.0f) - as_bits(16384.0f);
    return (uint8_t)((magnitude >= 0x3c800000u ? normal : small) | ((bits >> 24) & 0x80u));
}
INLINE float from_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7fu;
    float normal = as_float((magnitude << 20) + (120u << 23));
    float small = as_float((magnitude << 20) + (121u << 23)) - 0.015625f;
    return as_float(as_bits(magnitude >= 8u ? normal : small) | ((uint32_t)(code & 0x80u) << 24));
}

#define LEVELS_int8 127.0f
#define LEVELS_int4 7.0f
#define LEVELS_e4m3 448.0f
#define BYTES_int8(n) (n)
#define BYTES_int4(n) (((n) + 1) / 2)
#define BYTES_e4m3(n) (n)

#define SCALED(D, i, kind) (load_##D(x[i]) / divisor * LEVELS_##kind)
#define VALUE(D, code, kind) store_##D((float)(code) * (1.0f / LEVELS_##kind) * scale)

#define QUANTISE_int8(D) \
    for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)(int8_t)(int32_t)rintf(SCALED(D, i, int8));
#define QUANTISE_e4m3(D) \
    for (int64_t i = 0; i < n; i++) codes[i] = to_e4m3(SCALED(D, i, e4m3));
#define QUANTISE_int4(D) \
    int64_t half = (n + 1) / 2; \
    for (int64_t i = 0; i < n - half; i++) { \
        uint32_t low = (uint32_t)(int32_t)rintf(SCALED(D, i, int4)); \
        uint32_t high = (uint32_t)(int32_t)rintf(SCALED(D, half + i, int4)); \
        codes[i] = (uint8_t)((low & 15u) | (high << 4)); \
    } \
    if (n % 2) codes[half - 1] = (uint8_t)((uint32_t)(int32_t)rintf(SCALED(D, half - 1, int4)) & 15u);

#define RESTORE_int8(D) \
    for (int64_t i = 0; i < n; i++) x[i] = VALUE(D, (int8_t)codes[i], int8);
#define RESTORE_e4m3(D) \
    for (int64_t i = 0; i < n; i++) x[i] = VALUE(D, from_e4m3(codes[i]), e4m3);
#define RESTORE_int4(D) \
    int64_t half = (n + 1) / 2; \
    for (int64_t i = 0; i < half; i++) x[i] = VALUE(D, (int8_t)(uint8_t)(codes[i] << 4) >> 4, int4); \
    for (int64_t i = 0; i < n - half; i++) x[half + i] = VALUE(D, (int8_t)codes[i] >> 4, int4);

/* one group of n elements, and all groups of a tensor; "width" is a constant in the calls below, so loops unroll */
#define DEFINE(kind, D) \
    INLINE int encode_group_##kind##_##D(const D *restrict x, uint8_t *restrict codes, D *restrict peak, int64_t n) { \
        D largest = 0; \
        for (int64_t i = 0; i < n; i++) { \
            D magnitude = x[i] & MAGNITUDE_##D; \
            largest = magnitude > largest ? magnitude : largest; \
        } \
        *peak = largest; \
        if (largest >= INFINITY_##D) { memset(codes, 0, BYTES_##kind(n)); return 1; } \
        float divisor = largest ? load_##D(largest) : 1.0f; \
        QUANTISE_##kind(D) \
        return 0; \
    } \
    INLINE void decode_group_##kind##_##D(const uint8_t *restrict codes, D peak, D *restrict x, int64_t n) { \
        float scale = load_##D(peak); \
        RESTORE_##kind(D) \
    } \
    INLINE int64_t encode_all_##kind##_##D(const D *x, uint8_t *codes, D *peaks, int64_t numel, int64_t width, \
                                           int threads) { \
        int64_t whole = numel / width, rest = numel % width, bad = 0; \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1 && numel >= PARALLEL_FROM) reduction(+ : bad)") \
        for (int64_t g = 0; g < whole; g++) \
            bad += encode_group_##kind##_##D(x + g * width, codes + g * BYTES_##kind(width), peaks + g, width); \
        if (rest) bad += encode_group_##kind##_##D(x + whole * width, codes + whole * BYTES_##kind(width), \
                                                   peaks + whole, rest); \
        return bad; \
    } \
    INLINE void decode_all_##kind##_##D(const uint8_t *codes, const D *peaks, D *x, int64_t numel, int64_t width, \
                                        int threads) { \
        int64_t whole = numel / width, rest = numel % width; \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1 && numel >= PARALLEL_FROM)") \
        for (int64_t g = 0; g < whole; g++) \
            decode_group_##kind##_##D(codes + g * BYTES_##kind(width), peaks[g], x + g * width, width); \
        if (rest) decode_group_##kind##_##D(codes + whole * BYTES_##kind(width), peaks[whole], x + whole * width, \
                                            rest); \
    } \
    int64_t encode_##kind##_##D(const void *x, void *codes, void *peaks, int64_t numel, int64_t group, int threads) { \
        if (group == 64) return encode_all_##kind##_##D(x, codes, peaks, numel, 64, threads); \
        if (group == 128) return encode_all_##kind##_##D(x, codes, peaks, numel, 128, threads); \
        return encode_all_##kind##_##D(x, codes, peaks, numel, group, threads); \
    } \
    void decode_##kind##_##D(const void *codes, const void *peaks, void *x, int64_t numel, int64_t group, \
                             int threads) { \
        if (group == 64) decode_all_##kind##_##D(codes, peaks, x, numel, 64, threads); \
        else if (group == 128) decode_all_##kind##_##D(codes, peaks, x, numel, 128, threads); \
        else decode_all_##kind##_##D(codes, peaks, x, numel, group, threads); \
    }

DEFINE(int8, bf16)
DEFINE(int8, f32)
DEFINE(int4, bf16)
DEFINE(int4, f32)
DEFINE(e4m3, bf16)
DEFINE(e4m3, f32)

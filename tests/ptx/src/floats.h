// Floats of 16 and 8 bits, and results rounded once.
#pragma once

#include <array>
#include <cmath>

#include "emulator.h"

namespace ptx {

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline float to_float(float x) { return x; }
inline float to_float(f16 x) { return static_cast<float>(x); }
inline float to_float(bf16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }

// Floats of 8 bits: E of the exponent, M of the mantissa. E4M3 has no infinity, and NaN is all bits.
template <int E, int M>
inline float of_8_bits(uint8_t bits) {
    constexpr int bias = (1 << (E - 1)) - 1;
    int exponent = bits >> M & ((1 << E) - 1), mantissa = bits & ((1 << M) - 1);
    float size;
    if (E == 5 && exponent == 31) {
        size = mantissa ? std::nanf("") : INFINITY;
    } else if (E == 4 && exponent == 15 && mantissa == 7) {
        size = std::nanf("");
    } else if (exponent == 0) {
        size = std::ldexp(float(mantissa), 1 - bias - M);
    } else {
        size = std::ldexp(float(mantissa + (1 << M)), exponent - bias - M);
    }
    return bits & 0x80 ? -size : size;
}

struct e4m3 {
    uint8_t bits;
};

inline float to_float(e4m3 x) {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> all;
        for (int code = 0; code < 256; code++) all[size_t(code)] = of_8_bits<4, 3>(uint8_t(code));
        return all;
    }();
    return values[x.bits];
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline f16 from_float<f16>(float x) {
    return static_cast<f16>(x);
}
template <>
inline bf16 from_float<bf16>(float x) {
    uint32_t bits = bits_of<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fff : rounded)};
}

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// a b + c as a double whose last bit is set if the result is not exact: rounded again, to far fewer bits, it is as if
// rounded once. The product is exact for floats of 16 bits.
inline double fused_to_odd(double a, double b, double c) {
    double product = a * b, sum = product + c;
    double rest = sum - product, error = (product - (sum - rest)) + (c - rest);
    if (error != 0 && std::isfinite(sum) && !(bits_of<uint64_t>(sum) & 1)) {
        bool larger = (error > 0) == (sum > 0);
        sum = bits_of<double>(bits_of<uint64_t>(sum) + (larger ? 1 : uint64_t(-1)));
    }
    return sum;
}

// A double as a float whose last bit is set if that is not exact.
inline float to_odd(double x) {
    float y = static_cast<float>(x);
    if (static_cast<double>(y) != x && std::isfinite(y) && !(bits_of<uint32_t>(y) & 1)) {
        bool larger = std::fabs(static_cast<double>(y)) < std::fabs(x);
        y = bits_of<float>(bits_of<uint32_t>(y) + (larger ? 1u : uint32_t(-1)));
    }
    return y;
}

inline float toward_zero(double x) {
    float y = static_cast<float>(x);
    return std::fabs(static_cast<double>(y)) > std::fabs(x) && std::isfinite(x) ? std::nextafter(y, 0.0f) : y;
}

// A sum whose largest addend is `largest`, cut off toward zero: a float has 23 bits after the first, but of products of
// 8-bit floats tensor cores align all addends to the largest and keep 13 (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).
inline float cut_off(double sum, double largest, bool of_8_bits) {
    if (!of_8_bits || largest == 0 || !std::isfinite(sum)) return toward_zero(sum);
    const double place = std::ldexp(1.0, std::ilogb(largest) - 13);
    return float(std::trunc(sum / place) * place);
}

}  // namespace ptx

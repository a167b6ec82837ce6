// Floats of 16 and 8 bits, and results rounded once.
#pragma once

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

}  // namespace ptx

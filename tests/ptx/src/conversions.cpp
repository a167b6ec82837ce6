// Conversions between integers and floats.
#include <limits>
#include <type_traits>

#include "elementwise.h"
#include "floats.h"

namespace ptx {
namespace {

// Integers D from S, in registers of the types DR and SR, which may be wider.
template <class D, class DR, class S, class SR>
DR integer(SR a) {
    return DR(D(S(a)));
}

template <class D>
D from_integer(double x) {
    return from_float<D>(to_odd(x));
}
template <>
float from_integer(double x) {
    return static_cast<float>(x);
}
template <class D, class S, class SR>
D float_of_integer(SR a) {
    static_assert(sizeof(S) <= 4, "exact as a double");
    return from_integer<D>(static_cast<double>(S(a)));
}

enum class Rounding { NEAREST, ZERO, DOWN, UP };

template <Rounding R>
float rounded(float x) {
    return R == Rounding::NEAREST ? std::nearbyint(x)
           : R == Rounding::ZERO  ? std::trunc(x)
           : R == Rounding::DOWN  ? std::floor(x)
                                  : std::ceil(x);
}
// Clamped to what D has; 0 of NaN.
template <class D, class DR, class S, Rounding R>
DR integer_of_float(S a) {
    double x = rounded<R>(to_float(a));
    if (x != x) return 0;
    constexpr double least = double(std::numeric_limits<D>::min()), most = double(std::numeric_limits<D>::max());
    return DR(x <= least ? std::numeric_limits<D>::min() : x >= most ? std::numeric_limits<D>::max() : D(x));
}

template <class S>
float float_of_half(S a) {
    return to_float(a);
}
template <class D>
D half_of_float(float a) {
    return from_float<D>(a);
}
f16 half_cut_off(float a) {
    f16 found = from_float<f16>(a);
    if (std::isnan(a) || std::fabs(to_float(found)) <= std::fabs(a)) return found;
    return bits_of<f16>(uint16_t(bits_of<uint16_t>(found) - 1));  // of an infinity the largest number
}
bf16 bf16_of_f16(f16 a) {
    bf16 found = from_float<bf16>(to_float(a));
    if (to_float(found) != to_float(a) && a == a) throw Fault("bf16 cannot hold the number, and no rounding is given");
    return found;
}
// The first operand becomes the upper half.
template <class D>
uint32_t pair_of_floats(float upper, float lower) {
    return uint32_t(bits_of<uint16_t>(from_float<D>(upper))) << 16 | bits_of<uint16_t>(from_float<D>(lower));
}

template <int E, int M>
uint32_t floats_of_8_bits(uint16_t two) {
    uint32_t lower = bits_of<uint16_t>(f16(of_8_bits<E, M>(uint8_t(two))));
    return uint32_t(bits_of<uint16_t>(f16(of_8_bits<E, M>(uint8_t(two >> 8))))) << 16 | lower;
}
// To the nearest, ties to even; beyond the largest finite number, that one.
template <int E, int M>
uint8_t to_8_bits(float x) {
    constexpr int bias = (1 << (E - 1)) - 1;
    constexpr float most = E == 4 ? 448.0f : 57344.0f;
    uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (x != x) return 0x7f;
    float size = std::fabs(x);
    if (size >= most) return sign | (E == 4 ? 0x7e : 0x7b);
    int exponent = size == 0 ? 1 - bias : std::max(std::ilogb(size), 1 - bias);
    float steps = std::nearbyint(std::ldexp(size, M - exponent));  // of the last bit
    int code = int(steps) + ((exponent + bias - 1) << M);
    return sign | uint8_t(std::min(code, E == 4 ? 0x7e : 0x7b));
}
template <int E, int M>
uint16_t two_of_8_bits(float upper, float lower) {
    return uint16_t(to_8_bits<E, M>(upper) << 8 | to_8_bits<E, M>(lower));
}
template <int E, int M>
uint16_t two_halves_of_8_bits(uint32_t two) {
    auto half = [&](int shift) { return to_float(bits_of<f16>(uint16_t(two >> shift))); };
    return two_of_8_bits<E, M>(half(16), half(0));
}

template <class T>
const char* name_of() {
    constexpr bool with_sign = std::is_signed_v<T>;
    return sizeof(T) == 1   ? with_sign ? "s8" : "u8"
           : sizeof(T) == 2 ? with_sign ? "s16" : "u16"
           : sizeof(T) == 4 ? with_sign ? "s32" : "u32"
                            : with_sign ? "s64" : "u64";
}

// A register as wide as T, or also a wider one for 8 bits.
template <class D, class DR, class S, class SR>
void add_integer_in(std::vector<Kind>& all) {
    add<integer<D, DR, S, SR>>(all, std::string("cvt.") + name_of<D>() + "." + name_of<S>());
}
template <class D, class S>
void add_integer(std::vector<Kind>& all) {
    using DR = std::conditional_t<sizeof(D) == 1, std::conditional_t<std::is_signed_v<D>, int16_t, uint16_t>, D>;
    if constexpr (sizeof(S) == 1) {
        add_integer_in<D, DR, S, uint8_t>(all);
        add_integer_in<D, DR, S, uint16_t>(all);
        add_integer_in<D, DR, S, uint32_t>(all);
    } else {
        add_integer_in<D, DR, S, S>(all);
    }
}
template <class D, class... S>
void add_integers_of(std::vector<Kind>& all) {
    (add_integer<D, S>(all), ...);
}
template <class... D>
void add_all_integers(std::vector<Kind>& all) {
    (add_integers_of<D, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(all), ...);
}

template <class D>
void add_floats_of_integers(std::vector<Kind>& all, const std::string& type) {
    std::string name = "cvt.rn." + type + ".";
    add<float_of_integer<D, int8_t, uint8_t>>(all, name + "s8");
    add<float_of_integer<D, int8_t, uint16_t>>(all, name + "s8");
    add<float_of_integer<D, uint8_t, uint8_t>>(all, name + "u8");
    add<float_of_integer<D, uint8_t, uint16_t>>(all, name + "u8");
    add<float_of_integer<D, int16_t, int16_t>>(all, name + "s16");
    add<float_of_integer<D, uint16_t, uint16_t>>(all, name + "u16");
    add<float_of_integer<D, int32_t, int32_t>>(all, name + "s32");
    add<float_of_integer<D, uint32_t, uint32_t>>(all, name + "u32");
}
template <class S, Rounding R>
void add_integers_of_floats(std::vector<Kind>& all, const std::string& rounding, const std::string& type) {
    auto name = [&](const char* to) { return "cvt." + rounding + "." + to + "." + type; };
    add<integer_of_float<int8_t, int16_t, S, R>>(all, name("s8"));
    add<integer_of_float<uint8_t, uint16_t, S, R>>(all, name("u8"));
    add<integer_of_float<int16_t, int16_t, S, R>>(all, name("s16"));
    add<integer_of_float<uint16_t, uint16_t, S, R>>(all, name("u16"));
    add<integer_of_float<int32_t, int32_t, S, R>>(all, name("s32"));
    add<integer_of_float<uint32_t, uint32_t, S, R>>(all, name("u32"));
    if constexpr (std::is_same_v<S, float>) add<rounded<R>>(all, name("f32"));
}
template <class S>
void add_roundings(std::vector<Kind>& all, const std::string& type) {
    add_integers_of_floats<S, Rounding::NEAREST>(all, "rni", type);
    add_integers_of_floats<S, Rounding::ZERO>(all, "rzi", type);
    add_integers_of_floats<S, Rounding::DOWN>(all, "rmi", type);
    add_integers_of_floats<S, Rounding::UP>(all, "rpi", type);
}

}  // namespace

void add_conversions(std::vector<Kind>& all) {
    add_all_integers<int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(all);
    add_floats_of_integers<float>(all, "f32");
    add_floats_of_integers<f16>(all, "f16");
    add_floats_of_integers<bf16>(all, "bf16");
    add_roundings<float>(all, "f32");
    add_roundings<f16>(all, "f16");
    add<float_of_half<f16>>(all, "cvt.f32.f16");
    add<float_of_half<bf16>>(all, "cvt.f32.bf16");
    add<half_of_float<f16>>(all, "cvt.rn.f16.f32");
    add<half_of_float<bf16>>(all, "cvt.rn.bf16.f32");
    add<half_cut_off>(all, "cvt.rz.f16.f32");
    add<pair_of_floats<f16>>(all, "cvt.rn.f16x2.f32");
    add<pair_of_floats<bf16>>(all, "cvt.rn.bf16x2.f32");
    add<bf16_of_f16>(all, "cvt.bf16.f16");
    add<floats_of_8_bits<4, 3>>(all, "cvt.rn.f16x2.e4m3x2");
    add<floats_of_8_bits<5, 2>>(all, "cvt.rn.f16x2.e5m2x2");
    add<two_of_8_bits<4, 3>>(all, "cvt.rn.satfinite.e4m3x2.f32");
    add<two_of_8_bits<5, 2>>(all, "cvt.rn.satfinite.e5m2x2.f32");
    add<two_halves_of_8_bits<4, 3>>(all, "cvt.rn.satfinite.e4m3x2.f16x2");
}

}  // namespace ptx

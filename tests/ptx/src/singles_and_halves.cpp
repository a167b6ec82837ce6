// Arithmetic of floats of 32 and 16 bits.
#include "elementwise.h"
#include "floats.h"

namespace ptx {
namespace {

template <class T>
T add_floats(T a, T b) {
    return from_float<T>(to_float(a) + to_float(b));
}
template <class T>
T subtract_floats(T a, T b) {
    return from_float<T>(to_float(a) - to_float(b));
}
template <class T>
T multiply_floats(T a, T b) {
    return from_float<T>(to_float(a) * to_float(b));
}
float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class T>
T fused_half(T a, T b, T c) {
    return from_float<T>(to_odd(fused_to_odd(to_float(a), to_float(b), to_float(c))));
}
template <class T>
T negative_float(T a) {
    return bits_of<T>(uint16_t(bits_of<uint16_t>(a) ^ 0x8000));
}
template <>
float negative_float(float a) {
    return -a;
}
template <class T>
T absolute_float(T a) {
    return bits_of<T>(uint16_t(bits_of<uint16_t>(a) & 0x7fff));
}
template <>
float absolute_float(float a) {
    return std::fabs(a);
}
// Of a number and NaN, the number; of zeros, the negative or the positive one.
float smaller_float(float a, float b) {
    float equal = bits_of<float>(bits_of<uint32_t>(a) | bits_of<uint32_t>(b));
    return a != a ? b : b != b ? a : a == b ? equal : a < b ? a : b;
}
float larger_float(float a, float b) {
    float equal = bits_of<float>(bits_of<uint32_t>(a) & bits_of<uint32_t>(b));
    return a != a ? b : b != b ? a : a == b ? equal : a > b ? a : b;
}
template <class T>
T smaller_half(T a, T b) {
    return from_float<T>(smaller_float(to_float(a), to_float(b)));
}
template <class T>
T larger_half(T a, T b) {
    return from_float<T>(larger_float(to_float(a), to_float(b)));
}
float quotient(float a, float b) { return a / b; }
float power_of_two(float a) { return std::exp2(a); }
float reciprocal(float a) { return 1.0f / a; }
float root(float a) { return std::sqrt(a); }
// Approximations may be off by what NVIDIA's PTX ISA 9.1 says (sections 9.7.3.8 to 9.7.3.22): by a number of floats (ulp)
// from the correctly rounded result, or by a relative or absolute error. Here they are off by that, up or down as the
// bits of the operand have it.
bool is_up(float a) { return bits_of<uint32_t>(a) * 0x9e3779b9u >> 31; }
template <int ULPS>
float off_by_floats(float y, float a) {
    const float end = is_up(a) ? INFINITY : -INFINITY;
    for (int i = 0; i < ULPS && approximate && std::isfinite(y) && y != 0; i++) y = std::nextafter(y, end);
    return y;
}
template <float (*F)(float), int ULPS>
float near(float a) {
    return off_by_floats<ULPS>(F(a), a);
}
template <float (*F)(float, float), int ULPS>
float near(float a, float b) {
    return off_by_floats<ULPS>(F(a, b), a + b);
}
// By 2 ** (-TENTHS / 10) of the result, or absolutely.
template <int TENTHS>
float off_by(double y, float a, bool absolute = false) {
    if (!approximate || !std::isfinite(y)) return float(y);
    const double error = std::exp2(-TENTHS / 10.0) * (absolute ? 1.0 : y);
    return float(is_up(a) ? y + error : y - error);
}
float near_root(float a) { return off_by<230>(std::sqrt(double(a)), a); }
float near_reciprocal_root(float a) { return off_by<229>(1.0 / std::sqrt(double(a)), a); }
float near_tangent(float a) { return off_by<110>(std::tanh(double(a)), a); }
float near_logarithm(float a) { return off_by<220>(std::log2(double(a)), a, a > 0.5f && a < 2.0f); }
// With operands and results too small to be normal as zeros.
template <float (*F)(float)>
float flushed(float a) {
    return flush(F(flush(a)));
}
template <float (*F)(float, float)>
float flushed(float a, float b) {
    return flush(F(flush(a), flush(b)));
}
template <float (*F)(float, float, float)>
float flushed(float a, float b, float c) {
    return flush(F(flush(a), flush(b), flush(c)));
}

// Two floats of 16 bits in a register.
template <class T, T (*F)(T, T)>
uint32_t pair(uint32_t a, uint32_t b) {
    uint32_t found = 0;
    for (int half = 0; half < 32; half += 16) {
        T one = F(bits_of<T>(uint16_t(a >> half)), bits_of<T>(uint16_t(b >> half)));
        found |= uint32_t(bits_of<uint16_t>(one)) << half;
    }
    return found;
}
template <class T>
uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t found = 0;
    for (int half = 0; half < 32; half += 16) {
        T one = fused_half(
            bits_of<T>(uint16_t(a >> half)), bits_of<T>(uint16_t(b >> half)), bits_of<T>(uint16_t(c >> half)));
        found |= uint32_t(bits_of<uint16_t>(one)) << half;
    }
    return found;
}
uint32_t negative_pair(uint32_t a) { return a ^ 0x80008000u; }
uint32_t absolute_pair(uint32_t a) { return a & 0x7fff7fffu; }

// A function of floats under names like "add.rn.", which ".ftz" may follow.
template <auto F, auto FLUSHED>
void add_single(std::vector<Kind>& all, std::initializer_list<const char*> names) {
    for (const std::string name : names) {
        add<F>(all, name + ".f32");
        add<FLUSHED>(all, name + ".ftz.f32");
    }
}
template <float (*F)(float)>
void add_unary(std::vector<Kind>& all, std::initializer_list<const char*> names) {
    constexpr float (*with_zeros)(float) = flushed<F>;
    add_single<F, with_zeros>(all, names);
}
template <float (*F)(float, float)>
void add_binary(std::vector<Kind>& all, std::initializer_list<const char*> names) {
    constexpr float (*with_zeros)(float, float) = flushed<F>;
    add_single<F, with_zeros>(all, names);
}

void add_singles(std::vector<Kind>& all) {
    add_binary<add_floats<float>>(all, {"add", "add.rn"});
    add_binary<subtract_floats<float>>(all, {"sub", "sub.rn"});
    add_binary<multiply_floats<float>>(all, {"mul", "mul.rn"});
    add_binary<smaller_float>(all, {"min"});
    add_binary<larger_float>(all, {"max"});
    add_binary<quotient>(all, {"div.rn"});
    add_binary<near<quotient, 2>>(all, {"div.full", "div.approx"});
    add_unary<negative_float<float>>(all, {"neg"});
    add_unary<absolute_float<float>>(all, {"abs"});
    add_unary<reciprocal>(all, {"rcp.rn"});
    add_unary<root>(all, {"sqrt.rn"});
    add_unary<near<power_of_two, 2>>(all, {"ex2.approx"});
    add_unary<near_logarithm>(all, {"lg2.approx"});
    add_unary<near<reciprocal, 1>>(all, {"rcp.approx"});
    add_unary<near_root>(all, {"sqrt.approx"});
    add_unary<near_reciprocal_root>(all, {"rsqrt.approx"});
    add<near_tangent>(all, "tanh.approx.f32");
    constexpr float (*with_zeros)(float, float, float) = flushed<fused>;
    add_single<fused, with_zeros>(all, {"fma.rn"});
}

template <class T>
void add_halves(std::vector<Kind>& all, const std::string& type) {
    for (const std::string rounding : {"", "rn."}) {
        add<add_floats<T>>(all, "add." + rounding + type);
        add<subtract_floats<T>>(all, "sub." + rounding + type);
        add<multiply_floats<T>>(all, "mul." + rounding + type);
        add<pair<T, add_floats<T>>>(all, "add." + rounding + type + "x2");
        add<pair<T, subtract_floats<T>>>(all, "sub." + rounding + type + "x2");
        add<pair<T, multiply_floats<T>>>(all, "mul." + rounding + type + "x2");
    }
    add<fused_half<T>>(all, "fma.rn." + type);
    add<fused_pair<T>>(all, "fma.rn." + type + "x2");
    add<negative_float<T>>(all, "neg." + type);
    add<absolute_float<T>>(all, "abs." + type);
    add<negative_pair>(all, "neg." + type + "x2");
    add<absolute_pair>(all, "abs." + type + "x2");
    add<smaller_half<T>>(all, "min." + type);
    add<larger_half<T>>(all, "max." + type);
    add<pair<T, smaller_half<T>>>(all, "min." + type + "x2");
    add<pair<T, larger_half<T>>>(all, "max." + type + "x2");
}

}  // namespace

void add_singles_and_halves(std::vector<Kind>& all) {
    add_singles(all);
    add_halves<f16>(all, "f16"), add_halves<bf16>(all, "bf16");
}

}  // namespace ptx

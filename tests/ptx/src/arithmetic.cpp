// Integers, bits, floats, comparisons, selections and moves.
#include <algorithm>
#include <type_traits>

#include "elementwise.h"
#include "floats.h"

namespace ptx {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

// --- integers: computed without sign, where an overflow is no error ---------------------------------------------------

template <class T>
T plus(T a, T b) {
    return T(Unsigned<T>(a) + Unsigned<T>(b));
}
template <class T>
T minus(T a, T b) {
    return T(Unsigned<T>(a) - Unsigned<T>(b));
}
template <class T>
T low(T a, T b) {
    return T(uint64_t(a) * uint64_t(b));
}
template <class T, class W>
T high(T a, T b) {
    return T((W(a) * W(b)) >> (8 * sizeof(T)));
}
template <class T, class W>
W wide(T a, T b) {
    return W(a) * W(b);
}
template <class T>
T mad_low(T a, T b, T c) {
    return plus(low(a, b), c);
}
template <class T, class W>
W mad_wide(T a, T b, W c) {
    return plus(wide<T, W>(a, b), c);
}
// The result of a division by zero is unspecified: all bits set, as GPUs have it.
template <class T>
T divide(T a, T b) {
    return b == 0 ? T(-1) : std::is_signed_v<T> && b == T(-1) ? minus(T(0), a) : T(a / b);
}
template <class T>
T rest(T a, T b) {
    return b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
}
template <class T>
T negative(T a) {
    return minus(T(0), a);
}
template <class T>
T absolute(T a) {
    return a < 0 ? negative(a) : a;
}
template <class T>
T smaller(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T larger(T a, T b) {
    return a < b ? b : a;
}
template <class T>
T left(T a, uint32_t n) {
    return n >= 8 * sizeof(T) ? T(0) : T(a << n);
}
template <class T>
T right(T a, uint32_t n) {
    constexpr uint32_t most = 8 * sizeof(T);
    return n >= most ? T(std::is_signed_v<T> && a < 0 ? -1 : 0) : T(a >> n);
}
template <class T>
T both(T a, T b) {
    return a & b;
}
template <class T>
T either(T a, T b) {
    return a | b;
}
template <class T>
T differing(T a, T b) {
    return a ^ b;
}
template <class T>
T inverse(T a) {
    return T(~a);
}
template <class T>
T field(T a, uint32_t position, uint32_t length) {
    position &= 0xff, length &= 0xff;
    constexpr uint32_t bits = 8 * sizeof(T);
    if (length == 0) return 0;
    uint32_t end = position + length;  // one beyond
    if (!std::is_signed_v<T>) {
        T shifted = right(a, position);
        return length >= bits ? shifted : T(shifted & ((T(1) << length) - 1));
    }
    end = std::min(end, bits);
    if (position >= bits) return right(a, bits - 1);
    return T(Unsigned<T>(a) << (bits - end)) >> (bits - end + position);
}
uint32_t lookup(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t found = 0;
    for (int i = 0; i < 8; i++) {
        if (table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return found;
}
uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t both_words = uint64_t(b) << 32 | a;
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t choice = selector >> (4 * i) & 15;
        uint32_t byte = both_words >> (8 * (choice & 7)) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        found |= byte << (8 * i);
    }
    return found;
}

template <class T>
void add_integers(std::vector<Kind>& all, const std::string& type) {
    add<plus<T>>(all, "add." + type);
    add<minus<T>>(all, "sub." + type);
    add<low<T>>(all, "mul.lo." + type);
    add<mad_low<T>>(all, "mad.lo." + type);
    add<divide<T>>(all, "div." + type);
    add<rest<T>>(all, "rem." + type);
    add<smaller<T>>(all, "min." + type);
    add<larger<T>>(all, "max." + type);
    add<right<T>>(all, "shr." + type);
}
template <class T>
void add_signed(std::vector<Kind>& all, const std::string& type) {
    add<negative<T>>(all, "neg." + type);
    add<absolute<T>>(all, "abs." + type);
}
template <class T>
void add_bits(std::vector<Kind>& all, const std::string& type) {
    add<both<T>>(all, "and." + type);
    add<either<T>>(all, "or." + type);
    add<differing<T>>(all, "xor." + type);
    add<inverse<T>>(all, "not." + type);
    add<left<T>>(all, "shl." + type);
    add<right<T>>(all, "shr." + type);
}

// --- floats -----------------------------------------------------------------------------------------------------------

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
float logarithm(float a) { return std::log2(a); }
float reciprocal(float a) { return 1.0f / a; }
float root(float a) { return std::sqrt(a); }
float reciprocal_root(float a) { return float(1.0 / std::sqrt(double(a))); }
float tangent(float a) { return std::tanh(a); }
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
    add_binary<quotient>(all, {"div.rn", "div.full", "div.approx"});
    add_unary<negative_float<float>>(all, {"neg"});
    add_unary<absolute_float<float>>(all, {"abs"});
    add_unary<power_of_two>(all, {"ex2.approx"});
    add_unary<logarithm>(all, {"lg2.approx"});
    add_unary<reciprocal>(all, {"rcp.rn", "rcp.approx"});
    add_unary<root>(all, {"sqrt.rn", "sqrt.approx"});
    add_unary<reciprocal_root>(all, {"rsqrt.approx"});
    add<tangent>(all, "tanh.approx.f32");
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

// --- predicates -------------------------------------------------------------------------------------------------------

template <class T>
bool equal(T a, T b) {
    return a == b;
}
template <class T>
bool unequal(T a, T b) {
    return a != b;
}
template <class T>
bool less(T a, T b) {
    return a < b;
}
template <class T>
bool less_or_equal(T a, T b) {
    return a <= b;
}
template <class T>
bool greater(T a, T b) {
    return a > b;
}
template <class T>
bool greater_or_equal(T a, T b) {
    return a >= b;
}
bool ordered(float a, float b) { return a == a && b == b; }
bool unordered(float a, float b) { return !ordered(a, b); }
template <bool (*F)(float, float)>
bool or_unordered(float a, float b) {
    return F(a, b) || unordered(a, b);
}
bool differing_floats(float a, float b) { return ordered(a, b) && a != b; }

template <class T>
void add_comparisons(std::vector<Kind>& all, const std::string& type) {
    compare<equal<T>>(all, "setp.eq." + type);
    compare<unequal<T>>(all, "setp.ne." + type);
    compare<less<T>>(all, "setp.lt." + type);
    compare<less_or_equal<T>>(all, "setp.le." + type);
    compare<greater<T>>(all, "setp.gt." + type);
    compare<greater_or_equal<T>>(all, "setp.ge." + type);
}
template <bool (*F)(float, float)>
bool flushed_comparison(float a, float b) {
    return F(flush(a), flush(b));
}
template <bool (*F)(float, float)>
void compare_floats(std::vector<Kind>& all, const std::string& name) {
    compare<F>(all, "setp." + name + ".f32");
    compare<flushed_comparison<F>>(all, "setp." + name + ".ftz.f32");
}
void add_float_comparisons(std::vector<Kind>& all) {
    compare_floats<equal<float>>(all, "eq");
    compare_floats<differing_floats>(all, "ne");
    compare_floats<less<float>>(all, "lt");
    compare_floats<less_or_equal<float>>(all, "le");
    compare_floats<greater<float>>(all, "gt");
    compare_floats<greater_or_equal<float>>(all, "ge");
    compare_floats<or_unordered<equal<float>>>(all, "equ");
    compare_floats<or_unordered<unequal<float>>>(all, "neu");
    compare_floats<or_unordered<less<float>>>(all, "ltu");
    compare_floats<or_unordered<less_or_equal<float>>>(all, "leu");
    compare_floats<or_unordered<greater<float>>>(all, "gtu");
    compare_floats<or_unordered<greater_or_equal<float>>>(all, "geu");
    compare_floats<ordered>(all, "num");
    compare_floats<unordered>(all, "nan");
}

enum class Logic { AND, OR, XOR };

// Defined where one operand decides.
template <Logic L>
void combine(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    Mask a = w.predicate(o[1]), b = w.predicate(o[2]);
    Mask ua = w.undefined(o[1], 0), ub = w.undefined(o[2], 0);
    Mask decided = L == Logic::AND ? (~a & ~ua) | (~b & ~ub) : L == Logic::OR ? (a & ~ua) | (b & ~ub) : 0;
    Mask found = L == Logic::AND ? a & b : L == Logic::OR ? a | b : a ^ b;
    w.assign_predicate(o[0], found, (ua | ub) & ~decided, m);
}
void invert(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    w.assign_predicate(o[0], ~w.predicate(o[1]), w.undefined(o[1], 0), m);
}
void move_predicate(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    w.assign_predicate(o[0], w.predicate(o[1]), w.undefined(o[1], 0), m);
}

// --- selections and moves ---------------------------------------------------------------------------------------------

template <class T>
void select(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    const T *a = w.value<T>(o[1]), *b = w.value<T>(o[2]);
    Mask choice = w.predicate(o[3]);
    alignas(32) T out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = choice >> l & 1 ? a[l] : b[l];
    Mask ua = w.undefined(o[1], sizeof(T)), ub = w.undefined(o[2], sizeof(T));
    w.assign(o[0], out, w.undefined(o[3], 0) | (choice & ua) | (~choice & ub), m);
}
template <class T>
T same(T a) {
    return a;
}
// A register from its parts, the lowest first.
template <class D, class S>
void pack(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    constexpr int parts = sizeof(D) / sizeof(S);
    alignas(32) D out[LANES] = {};
    Mask bad = 0;
    for (int part = 0; part < parts; part++) {
        const S* in = w.value<S>(o[1 + part]);
        for (int l = 0; l < LANES; l++) out[l] |= D(in[l]) << (8 * sizeof(S) * part);
        bad |= w.undefined(o[1 + part], sizeof(S));
    }
    w.assign(o[0], out, bad, m);
}
// Its parts from a register, which is the last operand.
template <class S, class D>
void unpack(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    constexpr int parts = sizeof(S) / sizeof(D);
    alignas(32) S in[LANES];
    std::memcpy(in, w.value<S>(o[parts]), sizeof(in));
    Mask bad = w.undefined(o[parts], sizeof(S));
    for (int part = 0; part < parts; part++) {
        alignas(32) D out[LANES];
        for (int l = 0; l < LANES; l++) out[l] = D(in[l] >> (8 * sizeof(D) * part));
        w.assign(o[part], out, bad, m);
    }
}

template <class T>
void add_moves(std::vector<Kind>& all, const std::string& bits, const std::string& size) {
    for (const std::string letter : {"b", "u", "s", "f"}) {
        add<same<T>>(all, "mov." + letter + bits);
        all.push_back({"selp." + letter + bits, size + size + size + "p", select<T>});
    }
}

}  // namespace

void add_arithmetic(std::vector<Kind>& all) {
    add_integers<int16_t>(all, "s16"), add_integers<uint16_t>(all, "u16");
    add_integers<int32_t>(all, "s32"), add_integers<uint32_t>(all, "u32");
    add_integers<int64_t>(all, "s64"), add_integers<uint64_t>(all, "u64");
    add_signed<int16_t>(all, "s16"), add_signed<int32_t>(all, "s32"), add_signed<int64_t>(all, "s64");
    add_bits<uint16_t>(all, "b16"), add_bits<uint32_t>(all, "b32"), add_bits<uint64_t>(all, "b64");
    add<high<int32_t, int64_t>>(all, "mul.hi.s32"), add<high<uint32_t, uint64_t>>(all, "mul.hi.u32");
    add<wide<int16_t, int32_t>>(all, "mul.wide.s16"), add<wide<uint16_t, uint32_t>>(all, "mul.wide.u16");
    add<wide<int32_t, int64_t>>(all, "mul.wide.s32"), add<wide<uint32_t, uint64_t>>(all, "mul.wide.u32");
    add<mad_wide<int32_t, int64_t>>(all, "mad.wide.s32"), add<mad_wide<uint32_t, uint64_t>>(all, "mad.wide.u32");
    add<field<int32_t>>(all, "bfe.s32"), add<field<uint32_t>>(all, "bfe.u32");
    add<field<int64_t>>(all, "bfe.s64"), add<field<uint64_t>>(all, "bfe.u64");
    add<lookup>(all, "lop3.b32"), add<permute>(all, "prmt.b32");
    add_singles(all);
    add_halves<f16>(all, "f16"), add_halves<bf16>(all, "bf16");
    for (const char* letter : {"b", "u"}) {
        add_comparisons<uint16_t>(all, letter + std::string("16"));
        add_comparisons<uint32_t>(all, letter + std::string("32"));
        add_comparisons<uint64_t>(all, letter + std::string("64"));
    }
    add_comparisons<int16_t>(all, "s16"), add_comparisons<int32_t>(all, "s32"), add_comparisons<int64_t>(all, "s64");
    add_float_comparisons(all);
    all.push_back({"and.pred", "ppp", combine<Logic::AND>});
    all.push_back({"or.pred", "ppp", combine<Logic::OR>});
    all.push_back({"xor.pred", "ppp", combine<Logic::XOR>});
    all.push_back({"not.pred", "pp", invert});
    all.push_back({"mov.pred", "pp", move_predicate});
    add_moves<uint16_t>(all, "16", "2"), add_moves<uint32_t>(all, "32", "4"), add_moves<uint64_t>(all, "64", "8");
    all.push_back({"mov.b16.pack", "211", pack<uint16_t, uint8_t>});
    all.push_back({"mov.b32.pack", "422", pack<uint32_t, uint16_t>});
    all.push_back({"mov.b32.pack", "41111", pack<uint32_t, uint8_t>});
    all.push_back({"mov.b64.pack", "844", pack<uint64_t, uint32_t>});
    all.push_back({"mov.b64.pack", "82222", pack<uint64_t, uint16_t>});
    all.push_back({"mov.b16.unpack", "112", unpack<uint16_t, uint8_t>});
    all.push_back({"mov.b32.unpack", "224", unpack<uint32_t, uint16_t>});
    all.push_back({"mov.b32.unpack", "11114", unpack<uint32_t, uint8_t>});
    all.push_back({"mov.b64.unpack", "448", unpack<uint64_t, uint32_t>});
    all.push_back({"mov.b64.unpack", "22228", unpack<uint64_t, uint16_t>});
}

}  // namespace ptx

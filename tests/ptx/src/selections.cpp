// Comparisons, predicates, selections and moves.
#include "elementwise.h"
#include "floats.h"

namespace ptx {
namespace {

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

void add_selections(std::vector<Kind>& all) {
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

// Integers and bits: computed without sign, where an overflow is no error.
#include <algorithm>
#include <type_traits>

#include "elementwise.h"

namespace ptx {
namespace {

__extension__ typedef unsigned __int128 uint128_t;

template <class T>
using Unsigned = std::make_unsigned_t<T>;

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

}  // namespace

void add_integers(std::vector<Kind>& all) {
    add_integers<int16_t>(all, "s16"), add_integers<uint16_t>(all, "u16");
    add_integers<int32_t>(all, "s32"), add_integers<uint32_t>(all, "u32");
    add_integers<int64_t>(all, "s64"), add_integers<uint64_t>(all, "u64");
    add_signed<int16_t>(all, "s16"), add_signed<int32_t>(all, "s32"), add_signed<int64_t>(all, "s64");
    add_bits<uint16_t>(all, "b16"), add_bits<uint32_t>(all, "b32"), add_bits<uint64_t>(all, "b64");
    add<high<int32_t, int64_t>>(all, "mul.hi.s32"), add<high<uint32_t, uint64_t>>(all, "mul.hi.u32");
    add<high<uint16_t, uint32_t>>(all, "mul.hi.u16"), add<high<uint64_t, uint128_t>>(all, "mul.hi.u64");
    add<wide<int16_t, int32_t>>(all, "mul.wide.s16"), add<wide<uint16_t, uint32_t>>(all, "mul.wide.u16");
    add<wide<int32_t, int64_t>>(all, "mul.wide.s32"), add<wide<uint32_t, uint64_t>>(all, "mul.wide.u32");
    add<mad_wide<int32_t, int64_t>>(all, "mad.wide.s32"), add<mad_wide<uint32_t, uint64_t>>(all, "mad.wide.u32");
    add<field<int32_t>>(all, "bfe.s32"), add<field<uint32_t>>(all, "bfe.u32");
    add<field<int64_t>>(all, "bfe.s64"), add<field<uint64_t>>(all, "bfe.u64");
    add<lookup>(all, "lop3.b32"), add<permute>(all, "prmt.b32");
}

}  // namespace ptx

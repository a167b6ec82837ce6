// Makes handlers of functions of one lane's values.
#pragma once

#include <tuple>
#include <utility>

#include "emulator.h"

namespace ptx {

template <auto F>
struct Elementwise;

// d = F(a, ...) in every lane. A result is undefined where an operand is.
template <class D, class... S, D (*F)(S...)>
struct Elementwise<F> {
    template <size_t... N>
    static void apply(Warp& w, const Operand* o, Mask m, std::index_sequence<N...>) {
        const std::tuple<const S*...> in{w.value<S>(o[1 + N])...};
        alignas(32) D out[LANES];
        for (int l = 0; l < LANES; l++) out[l] = F(std::get<N>(in)[l]...);
        w.assign(o[0], out, (w.undefined(o[1 + N], sizeof(S)) | ...), m);
    }
    static void run(Warp& w, const Instruction& i, Mask m) {
        apply(w, i.operands, m, std::index_sequence_for<S...>{});
    }
    static Kind kind(const std::string& name) {
        return {name, std::string{char('0' + sizeof(D)), char('0' + sizeof(S))...}, run};
    }
};

// p = F(a, b) in every lane.
template <auto F>
struct Comparison;
template <class S, bool (*F)(S, S)>
struct Comparison<F> {
    static void run(Warp& w, const Instruction& i, Mask m) {
        const Operand* o = i.operands;
        const S *a = w.value<S>(o[1]), *b = w.value<S>(o[2]);
        Mask found = 0;
        for (int l = 0; l < LANES; l++) found |= Mask(F(a[l], b[l])) << l;
        w.assign_predicate(o[0], found, w.undefined(o[1], sizeof(S)) | w.undefined(o[2], sizeof(S)), m);
    }
    static Kind kind(const std::string& name) {
        char size = '0' + sizeof(S);
        return {name, std::string{'p', size, size}, run};
    }
};

template <auto F>
void add(std::vector<Kind>& all, const std::string& name) {
    all.push_back(Elementwise<F>::kind(name));
}
template <auto F>
void compare(std::vector<Kind>& all, const std::string& name) {
    all.push_back(Comparison<F>::kind(name));
}

}  // namespace ptx

// What the lanes of a warp do together: matrices in tensor cores and in shared memory, and exchanges of registers.
#include <algorithm>

#include "floats.h"

namespace ptx {
namespace {

// Matrices A [16, K], B [K, 8], C and D [16, 8]. Lane l has rows l / 4 and l / 4 + 8 of A, C and D, column l / 4 of B,
// and of 32 bits along K, or two numbers along the columns of C and D, those at l % 4.
constexpr int ROWS = 16, COLUMNS = 8;

// Which rows, columns and elements depend on something undefined.
struct Undefined {
    uint32_t rows = 0, columns = 0;
};

// Element e of the four or two registers of A or B.
template <class T, int K, int REGISTERS, class Store>
Mask spread(Warp& w, const Operand* o, Store store) {
    constexpr int per_register = 4 / sizeof(T);
    Mask undefined = 0;
    for (int r = 0; r < REGISTERS; r++) {
        const uint32_t* in = w.value<uint32_t>(o[r]);
        Mask bad = w.undefined(o[r], 4);
        bool lower = REGISTERS == 4 && r & 1;  // the rows from 8
        int first = (REGISTERS == 4 ? r >> 1 : r) * (K / 2);
        for (int l = 0; l < LANES; l++) {
            T parts[per_register];
            std::memcpy(parts, &in[l], 4);
            int line = (l >> 2) + 8 * lower;
            for (int e = 0; e < per_register; e++) store(line, first + (l & 3) * per_register + e, parts[e]);
            undefined |= Mask(bad >> l & 1) << line;
        }
    }
    return undefined;
}

template <class T>
void gather_sums(Warp& w, const Operand* o, T (*sums)[COLUMNS], Mask* bad) {
    for (int r = 0; r < 4; r++) {
        const T* in = w.value<T>(o[r]);
        for (int l = 0; l < LANES; l++) sums[(l >> 2) + 8 * (r >> 1)][(l & 3) * 2 + (r & 1)] = in[l];
        bad[r] = w.undefined(o[r], 4);
    }
}

template <class T>
void scatter_sums(Warp& w, const Operand* o, const T (*sums)[COLUMNS], const Mask* bad, Undefined lines) {
    for (int r = 0; r < 4; r++) {
        alignas(32) T out[LANES];
        Mask undefined = bad[r];
        for (int l = 0; l < LANES; l++) {
            int row = (l >> 2) + 8 * (r >> 1), column = (l & 3) * 2 + (r & 1);
            out[l] = sums[row][column];
            undefined |= Mask((lines.rows >> row | lines.columns >> column) & 1) << l;
        }
        w.assign(o[r], out, undefined, ALL);
    }
}

// Exact sums, rounded once, to nearest or toward zero.
template <class T>
void multiply_floats(Warp& w, const Instruction& i, Mask) {
    constexpr int K = 32 / sizeof(T);
    const Operand* o = i.operands;
    alignas(32) double a[ROWS][K], b[K][COLUMNS];
    alignas(32) float c[ROWS][COLUMNS];
    Undefined lines;
    lines.rows = spread<T, K, 4>(w, o + 4, [&](int row, int k, T x) { a[row][k] = to_float(x); });
    lines.columns = spread<T, K, 2>(w, o + 8, [&](int column, int k, T x) { b[k][column] = to_float(x); });
    Mask bad[4];
    gather_sums(w, o + 10, c, bad);
    const bool truncate = w.block->options.truncate;
    for (int row = 0; row < ROWS; row++) {
        double sums[COLUMNS], largest[COLUMNS];
        for (int n = 0; n < COLUMNS; n++) sums[n] = c[row][n], largest[n] = std::fabs(sums[n]);
        for (int k = 0; k < K; k++) {
            for (int n = 0; n < COLUMNS; n++) {
                const double product = a[row][k] * b[k][n];
                sums[n] += product, largest[n] = std::max(largest[n], std::fabs(product));
            }
        }
        for (int n = 0; n < COLUMNS; n++) {
            c[row][n] = truncate ? cut_off(sums[n], largest[n], sizeof(T) == 1) : float(sums[n]);
        }
    }
    scatter_sums(w, o, c, bad, lines);
}

template <bool SATURATE>
void multiply_bytes(Warp& w, const Instruction& i, Mask) {
    constexpr int K = 32;
    const Operand* o = i.operands;
    alignas(32) int32_t a[ROWS][K], b[K][COLUMNS], c[ROWS][COLUMNS];
    Undefined lines;
    lines.rows = spread<int8_t, K, 4>(w, o + 4, [&](int row, int k, int8_t x) { a[row][k] = x; });
    lines.columns = spread<int8_t, K, 2>(w, o + 8, [&](int column, int k, int8_t x) { b[k][column] = x; });
    Mask bad[4];
    gather_sums(w, o + 10, c, bad);
    for (int row = 0; row < ROWS; row++) {
        int32_t sums[COLUMNS] = {};
        for (int k = 0; k < K; k++) {
            for (int n = 0; n < COLUMNS; n++) sums[n] += a[row][k] * b[k][n];
        }
        for (int n = 0; n < COLUMNS; n++) {
            int64_t all = int64_t(c[row][n]) + sums[n];
            if (SATURATE) all = std::clamp<int64_t>(all, INT32_MIN, INT32_MAX);
            c[row][n] = int32_t(uint32_t(all));
        }
    }
    scatter_sums(w, o, c, bad, lines);
}

// Matrices of 8 rows of 16 bytes, whose addresses are those of lanes 0 to 7, 8 to 15, and so on.
template <bool TRANSPOSED>
void load_matrices(Warp& w, const Instruction& i, Mask) {
    const int count = i.count - 1;
    const Mask used = count == 4 ? ALL : (1u << (8 * count)) - 1;
    uint64_t address[LANES];
    w.addresses(i.operands[count], used, address);
    for (int matrix = 0; matrix < count; matrix++) {
        alignas(16) uint16_t rows[8][8];
        uint32_t bad = 0;
        for (int row = 0; row < 8; row++) {
            uint32_t at = uint32_t(address[8 * matrix + row]);
            bad |= uint32_t(w.block->shared.read(at, 16, w.number, reinterpret_cast<uint8_t*>(rows[row]))) << row;
        }
        alignas(32) uint32_t out[LANES];
        Mask undefined = 0;
        for (int l = 0; l < LANES; l++) {
            int line = l >> 2, first = (l & 3) * 2;
            uint32_t one = TRANSPOSED ? rows[first][line] : rows[line][first];
            uint32_t two = TRANSPOSED ? rows[first + 1][line] : rows[line][first + 1];
            out[l] = two << 16 | one;
            bool lost = TRANSPOSED ? bad >> first & 3 : bad >> line & 1;
            undefined |= Mask(lost) << l;
        }
        w.assign(i.operands[matrix], out, undefined, ALL);
    }
}

template <bool TRANSPOSED>
void store_matrices(Warp& w, const Instruction& i, Mask) {
    const int count = i.count - 1;
    const Mask used = count == 4 ? ALL : (1u << (8 * count)) - 1;
    uint64_t address[LANES];
    w.addresses(i.operands[count], used, address);
    for (int matrix = 0; matrix < count; matrix++) {
        alignas(16) uint16_t rows[8][8];
        const uint32_t* in = w.value<uint32_t>(i.operands[matrix]);
        const Mask bad = w.undefined(i.operands[matrix], 4);
        uint32_t lost[8] = {};  // the elements of each row
        for (int l = 0; l < LANES; l++) {
            for (int half = 0; half < 2; half++) {
                int line = l >> 2, place = (l & 3) * 2 + half;
                if (TRANSPOSED) std::swap(line, place);
                rows[line][place] = uint16_t(in[l] >> (16 * half));
                lost[line] |= uint32_t(bad >> l & 1) << place;
            }
        }
        for (int row = 0; row < 8; row++) {
            uint32_t at = uint32_t(address[8 * matrix + row]);
            const auto* data = reinterpret_cast<uint8_t*>(rows[row]);
            w.block->shared.write(at, 16, w.number, data, false);
            for (uint32_t place = 0; place < 8; place++) {
                if (lost[row] >> place & 1) w.block->shared.write(at + 2 * place, 2, w.number, data + 2 * place, true);
            }
        }
    }
}

// Registers of other lanes: d, [p,] a, b, c, members. Where the lane is outside of its part of the warp, its own one.
enum class Exchange { BUTTERFLY, INDEX, UP, DOWN };

template <Exchange X, bool PREDICATE>
void exchange(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands + PREDICATE;
    const uint32_t *a = w.value<uint32_t>(o[1]), *b = w.value<uint32_t>(o[2]), *c = w.value<uint32_t>(o[3]);
    const Mask bad = w.undefined(o[1], 4);
    if ((w.undefined(o[2], 4) | w.undefined(o[3], 4)) & m) throw Fault("undefined: which lane, was never written");
    if (w.value<uint32_t>(o[4])[0] != ALL) throw Fault("unsupported: an exchange in a part of a warp");
    alignas(32) uint32_t out[LANES];
    Mask undefined = 0, inside = 0;
    for (int l = 0; l < LANES; l++) {
        int segment = c[l] >> 8 & 31, by = b[l] & 31, clamp = c[l] & 31;
        int last = (l & segment) | (clamp & ~segment), first = l & segment;
        int from = X == Exchange::BUTTERFLY ? l ^ by : X == Exchange::UP ? l - by : X == Exchange::DOWN ? l + by
                                                                         : first | (by & ~segment);
        bool there = X == Exchange::UP ? from >= last : from <= last;
        if (!there) from = l;
        out[l] = a[from];
        undefined |= Mask(bad >> from & 1) << l;
        inside |= Mask(there) << l;
    }
    w.assign(i.operands[0], out, undefined, m);
    if (PREDICATE) w.assign_predicate(i.operands[1], inside, 0, m);
}

template <Exchange X>
void add_exchange(std::vector<Kind>& all, const std::string& name) {
    all.push_back({"shfl.sync." + name + ".b32", "44444", exchange<X, false>, Flow::NEXT, true});
    all.push_back({"shfl.sync." + name + ".b32", "4p4444", exchange<X, true>, Flow::NEXT, true});
}

// The sum, the least or the greatest of a register of all lanes, in each of them: d, a, members.
template <typename T, T (*F)(T, T)>
void reduce(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    const T* a = w.value<T>(o[1]);
    if (m != ALL || w.value<uint32_t>(o[2])[0] != ALL) throw Fault("unsupported: a reduction in a part of a warp");
    T whole = a[0];
    for (int l = 1; l < LANES; l++) whole = F(whole, a[l]);
    alignas(32) T out[LANES];
    std::fill(out, out + LANES, whole);
    w.assign(o[0], out, w.undefined(o[1], 4) ? ALL : 0, m);
}

template <typename T>
T plus(T a, T b) { return T(uint32_t(a) + uint32_t(b)); }
template <typename T>
T least(T a, T b) { return a < b ? a : b; }
template <typename T>
T greatest(T a, T b) { return a > b ? a : b; }

template <typename T>
void add_reductions(std::vector<Kind>& all, const std::string& type) {
    const std::string name = "redux.sync.";
    all.push_back({name + "add." + type, "444", reduce<T, plus<T>>, Flow::NEXT, true});
    all.push_back({name + "min." + type, "444", reduce<T, least<T>>, Flow::NEXT, true});
    all.push_back({name + "max." + type, "444", reduce<T, greatest<T>>, Flow::NEXT, true});
}

}  // namespace

void add_matrices(std::vector<Kind>& all) {
    const std::string mma = "mma.sync.aligned.", sizes = "44444444444444";
    auto together = [&](const std::string& name, const std::string& operands, Handler handler) {
        all.push_back({name, operands, handler, Flow::NEXT, true});
    };
    together(mma + "m16n8k16.row.col.f32.bf16.bf16.f32", sizes, multiply_floats<bf16>);
    together(mma + "m16n8k16.row.col.f32.f16.f16.f32", sizes, multiply_floats<f16>);
    together(mma + "m16n8k32.row.col.f32.e4m3.e4m3.f32", sizes, multiply_floats<e4m3>);
    together(mma + "m16n8k32.row.col.s32.s8.s8.s32", sizes, multiply_bytes<false>);
    together(mma + "m16n8k32.row.col.satfinite.s32.s8.s8.s32", sizes, multiply_bytes<true>);
    for (const char* count : {"1", "2", "4"}) {
        const std::string name = std::string("ldmatrix.sync.aligned.m8n8.x") + count;
        const std::string operands = std::string(std::stoul(count), '4') + "4";
        together(name + ".shared.b16", operands, load_matrices<false>);
        together(name + ".trans.shared.b16", operands, load_matrices<true>);
        const std::string stored = std::string("stmatrix.sync.aligned.m8n8.x") + count;
        together(stored + ".shared.b16", operands, store_matrices<false>);
        together(stored + ".trans.shared.b16", operands, store_matrices<true>);
    }
    add_exchange<Exchange::BUTTERFLY>(all, "bfly");
    add_exchange<Exchange::INDEX>(all, "idx");
    add_exchange<Exchange::UP>(all, "up");
    add_exchange<Exchange::DOWN>(all, "down");
    add_reductions<int32_t>(all, "s32"), add_reductions<uint32_t>(all, "u32");
}

}  // namespace ptx

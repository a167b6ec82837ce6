// Products of warpgroups (wgmma): four warps multiply 64 rows, 16 each, by a matrix in shared memory.
//
// Each warp is executed by itself. A product is computed when it is issued; until it is waited for, its sums are
// undefined, and what it reads from shared memory must not be written.
#include <algorithm>
#include <type_traits>

#include "floats.h"

namespace ptx {
namespace {

constexpr int ROWS = 16, MOST_COLUMNS = 256, CHUNK = 16;

// A matrix in shared memory, as PTX describes it ("Shared Memory Matrix Layout" of wgmma). Its memory consists of chunks
// of 16 bytes. K-major: a chunk is a part of a row, along K. Otherwise it is eight rows at one position along K.
class Matrix {
  public:
    Matrix(uint64_t bits, bool k_major) : k_major_(k_major) {
        start_ = field(bits, 0), leading_ = field(bits, 16), stride_ = field(bits, 32);
        if (bits >> 49 & 7) throw Fault("unsupported: a matrix descriptor with a base offset");
        const int mode = int(bits >> 62);
        width_ = mode == 0 ? 1 : 16 >> mode;  // chunks that are swizzled among each other
    }
    // Where the chunk of row `line` at chunk `along` is, or of rows 8 `line` to 8 `line` + 7 at position `along`.
    uint32_t chunk(int line, int along) const {
        const uint32_t l = uint32_t(line), k = uint32_t(along), row = CHUNK * width_;
        uint32_t at = start_;
        if (k_major_) at += l % 8 * row + l / 8 * stride_ + k * (width_ == 1 ? leading_ : CHUNK);
        else if (width_ == 1) at += l * stride_ + k % 8 * CHUNK + k / 8 * leading_;
        else at += l % width_ * CHUNK + l / width_ * leading_ + k % 8 * row + k / 8 * stride_;
        return at ^ (at >> 7 & (width_ - 1)) << 4;
    }
    bool k_major() const { return k_major_; }

  private:
    static uint32_t field(uint64_t bits, int shift) { return uint32_t(bits >> shift & 0x3fff) << 4; }
    uint32_t start_, leading_, stride_, width_;
    bool k_major_;
};

// The descriptor in a register, which all lanes have.
uint64_t descriptor(Warp& w, const Operand& o) {
    const uint64_t* bits = w.value<uint64_t>(o);
    if (w.undefined(o, 8)) throw Fault("undefined: a matrix descriptor depends on a value that was never written");
    if (std::any_of(bits, bits + LANES, [&](uint64_t other) { return other != bits[0]; })) {
        throw Fault("divergence: lanes have different matrix descriptors");
    }
    return bits[0];
}

// Calls `store(line, k, x)` for all elements of `lines` rows from `first` on; flags those that are undefined.
template <class T, class Store>
void read_matrix(Warp& w, const Matrix& from, int first, int lines, bool* undefined, Store store) {
    constexpr int per_chunk = CHUNK / sizeof(T), K = 2 * per_chunk;
    T parts[per_chunk];
    auto load = [&](int line, int along) {
        const uint32_t at = from.chunk(line, along);
        w.products.back().addresses.push_back(at);
        return w.block->shared.begin_product(at, w.number, reinterpret_cast<uint8_t*>(parts));
    };
    for (int line = first; from.k_major() && line < first + lines; line++) {
        for (int along = 0; along < 2; along++) {
            undefined[line - first] |= load(line, along);
            for (int e = 0; e < per_chunk; e++) store(line - first, along * per_chunk + e, parts[e]);
        }
    }
    for (int line = first; !from.k_major() && line < first + lines; line += per_chunk) {
        for (int k = 0; k < K; k++) {
            const bool bad = load(line / per_chunk, k);
            for (int e = 0; e < per_chunk; e++) {
                undefined[line - first + e] |= bad;
                store(line - first + e, k, parts[e]);
            }
        }
    }
}

// The same for 16 rows in four registers.
template <class T, class Store>
void read_registers(Warp& w, const Operand* o, bool* undefined, Store store) {
    constexpr int per_register = 4 / sizeof(T), K = 32 / sizeof(T);
    for (int r = 0; r < 4; r++) {
        const uint32_t* in = w.value<uint32_t>(o[r]);
        const Mask bad = w.undefined(o[r], 4);
        for (int l = 0; l < LANES; l++) {
            T parts[per_register];
            std::memcpy(parts, &in[l], 4);
            const int line = (l >> 2) + 8 * (r & 1);
            undefined[line] |= bad >> l & 1;
            for (int e = 0; e < per_register; e++) store(line, (r >> 1) * (K / 2) + (l & 3) * per_register + e, parts[e]);
        }
    }
}

double number(int8_t x) { return x; }
template <class T>
double number(T x) {
    return to_float(x);
}

// Exact: as a double, if rounded once at the end.
template <class T>
float rounded(double x, double largest, bool truncate, float) {
    return truncate ? cut_off(x, largest, sizeof(T) == 1) : float(x);
}
template <class T>
int32_t rounded(double x, double, bool, int32_t) {
    return int32_t(uint32_t(int64_t(x)));
}

// The constants after the predicate: for floats the signs of A and B, and for those of 16 bits whether A, unless it is
// in registers, and B are not K-major.
template <class T, class Sum, bool REGISTERS>
constexpr int CONSTANTS = std::is_same_v<Sum, int32_t> ? 0 : sizeof(T) == 1 ? 2 : REGISTERS ? 3 : 4;

// Sums [N / 2 registers], A [a descriptor or four registers], B [a descriptor], whether sums are added to, and constants.
template <class T, class Sum, bool REGISTERS>
void multiply(Warp& w, const Instruction& i, Mask) {
    constexpr int K = 32 / sizeof(T), constants = CONSTANTS<T, Sum, REGISTERS>;
    constexpr bool any_order = constants > 2;
    const int after = (REGISTERS ? 4 : 1) + 2 + constants, registers = i.count - after;
    const int columns = 2 * registers;
    const Operand *sums = i.operands, *a_at = sums + registers, *b_at = a_at + (REGISTERS ? 4 : 1), *rest = b_at + 1;
    if (columns % 8 || columns > MOST_COLUMNS) throw Fault("unsupported: a product of so many columns");
    if (w.block->warps.size() % 4) throw Fault("divergence: no four warps for a product of a warpgroup");
    if (!w.products_fenced) throw Fault("race: a product without wgmma.fence since the last group");
    auto constant = [&](int n) { return int32_t(w.value<uint32_t>(rest[n])[0]); };
    if (constants && (constant(1) != 1 || constant(2) != 1)) throw Fault("unsupported: a product of negated matrices");
    const bool a_k_major = !REGISTERS && (!any_order || constant(3) == 0);
    const bool b_k_major = !any_order || constant(REGISTERS ? 3 : 4) == 0;
    if (w.products.empty() || w.products.back().number != w.product_groups) {
        w.products.push_back({{}, w.product_groups});
    }
    static thread_local double a[ROWS][K], b[K][MOST_COLUMNS];
    bool bad_rows[ROWS] = {}, bad_columns[MOST_COLUMNS] = {};
    auto set_a = [&](int row, int k, T x) { a[row][k] = number(x); };
    if constexpr (REGISTERS) read_registers<T>(w, a_at, bad_rows, set_a);
    else read_matrix<T>(w, {descriptor(w, *a_at), a_k_major}, w.number % 4 * ROWS, ROWS, bad_rows, set_a);
    auto set_b = [&](int column, int k, T x) { b[k][column] = number(x); };
    read_matrix<T>(w, {descriptor(w, *b_at), b_k_major}, 0, columns, bad_columns, set_b);
    const Mask added = w.predicate(rest[0]);
    if (w.undefined(rest[0], 0)) throw Fault("undefined: whether sums are added to, depends on what was never written");
    for (int r = 0; r < registers; r++) {
        const Sum* in = w.value<Sum>(sums[r]);
        auto pending = w.sums.find(sums[r].offset);
        const Mask before = pending == w.sums.end() ? w.undefined(sums[r], 4) : pending->second.undefined;
        alignas(32) Sum out[LANES];
        Mask undefined = before & added;
        for (int l = 0; l < LANES; l++) {
            const int row = (l >> 2) + 8 * (r >> 1 & 1), column = r / 4 * 8 + (l & 3) * 2 + (r & 1);
            double sum = added >> l & 1 ? double(in[l]) : 0.0, largest = std::fabs(sum);
            for (int k = 0; k < K; k++) {
                const double product = a[row][k] * b[k][column];
                sum += product, largest = std::max(largest, std::fabs(product));
            }
            out[l] = rounded<T>(sum, largest, w.block->options.truncate, Sum());
            undefined |= Mask(bad_rows[row] || bad_columns[column]) << l;
        }
        w.assign(sums[r], out, ALL, ALL);
        w.sums[sums[r].offset] = {undefined, w.product_groups};
    }
}

void fence(Warp& w, const Instruction&, Mask) { w.products_fenced = true; }

void commit(Warp& w, const Instruction&, Mask) {
    w.product_groups++;
    w.products_fenced = false;
}

void wait(Warp& w, const Instruction& i, Mask) {
    const int64_t finished = w.product_groups - int64_t(w.value<uint32_t>(i.operands[0])[0]);
    while (!w.products.empty() && w.products.front().number < finished) {
        for (uint32_t address : w.products.front().addresses) w.block->shared.end_product(address);
        w.products.pop_front();
    }
    for (auto at = w.sums.begin(); at != w.sums.end();) {
        const auto& [offset, pending] = *at;
        if (pending.group >= finished) {
            ++at;
            continue;
        }
        w.undefined(Operand{0, offset, 4, 0, 0}, 4) = pending.undefined;
        at = w.sums.erase(at);
    }
}

void fence_memory(Warp& w, const Instruction&, Mask) { w.block->shared.fence_products(w.number); }

template <class T, class Sum>
void add_products(std::vector<Kind>& all, const std::string& types) {
    const std::string in_memory(CONSTANTS<T, Sum, false>, 'c'), in_registers(CONSTANTS<T, Sum, true>, 'c');
    for (int columns = 8; columns <= MOST_COLUMNS; columns += 8) {
        const std::string name = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(columns) + "k" +
                                 std::to_string(32 / sizeof(T)) + types;
        const std::string sums(size_t(columns) / 2, '4');
        all.push_back({name, sums + "88p" + in_memory, multiply<T, Sum, false>, Flow::NEXT, true});
        all.push_back({name, sums + "44448p" + in_registers, multiply<T, Sum, true>, Flow::NEXT, true});
    }
}

}  // namespace

void add_warpgroups(std::vector<Kind>& all) {
    add_products<f16, float>(all, ".f32.f16.f16");
    add_products<bf16, float>(all, ".f32.bf16.bf16");
    add_products<e4m3, float>(all, ".f32.e4m3.e4m3");
    add_products<int8_t, int32_t>(all, ".s32.s8.s8");
    all.push_back({"wgmma.fence.sync.aligned", "", fence, Flow::NEXT, true});
    all.push_back({"wgmma.commit_group.sync.aligned", "", commit, Flow::NEXT, true});
    all.push_back({"wgmma.wait_group.sync.aligned", "c", wait, Flow::NEXT, true});
    for (const char* space : {"", ".shared::cta"}) {
        all.push_back({std::string("fence.proxy.async") + space, "", fence_memory});
    }
}

}  // namespace ptx

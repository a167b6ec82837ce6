// A program of PTX and the machine that executes it: blocks of warps, whose 32 lanes compute in lockstep.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "global.h"

namespace ptx {

constexpr int LANES = 32;
constexpr int MAX_WARPS = 32;

// A bit per lane.
using Mask = uint32_t;
constexpr Mask ALL = 0xffffffffu;

// What a program does wrong, in one sentence.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct bf16 {
    uint16_t bits;
};
using f16 = _Float16;

// A register or a constant. A register is `size` bytes for each lane, then a Mask of the lanes whose value depends on
// something that was never written ("undefined"). A predicate (size 0) is a Mask, then that one. A constant has such
// values in all sizes.
struct Operand {
    int64_t displacement;  // of an address
    int32_t offset;        // in the registers of a warp or among the constants, bytes
    uint8_t size;
    uint8_t constant;
    uint16_t unused;
};

constexpr int32_t register_bytes(int size) { return size ? size * LANES + 32 : 32; }
// Where in a constant its values of a size are.
constexpr int32_t constant_offset(int size) {
    return size == 8 ? 0 : size == 4 ? 288 : size == 2 ? 448 : size == 1 ? 544 : 608;
}
constexpr int32_t CONSTANT_BYTES = 640;

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, Mask);

// What a handler does to control flow, or that it does nothing to it.
enum class Flow : uint8_t { NEXT, BRANCH, EXIT, BARRIER };

// A kind of instruction: its name, the sizes of its operands, and what executes it. Sizes are digits, with '+' also for
// wider registers, 'p' for a predicate, 'c' for a constant and 'a' for an address. After '*', the first one may be several.
struct Kind {
    std::string name;
    std::string sizes;
    Handler handler;
    Flow flow = Flow::NEXT;
    bool collective = false;  // whether all lanes of a warp have to take part
};

struct Instruction {
    Handler handler;
    const Operand* operands;
    int32_t count;
    int32_t guard;  // offset of a predicate, or -1
    bool negated;   // the guard
    bool collective;
    Flow flow;
    int32_t target;  // of a branch
};

struct Program {
    std::vector<Instruction> code;
    std::vector<Operand> operands;
    std::vector<uint8_t> constants;
    std::vector<uint32_t> sizes;  // of the registers, in their order
    int32_t register_bytes = 0;
    std::array<int32_t, 7> special{};  // offsets of %tid.x, of %ctaid's and %nctaid's .x, .y and .z, or -1
    int32_t threads = 0;
    int32_t shared = 0;
};

struct Options {
    uint64_t seed;        // of the order of blocks and warps; 0: in their order
    int64_t limit;        // instructions of a warp, beyond which it is considered endless
    int32_t truncate;     // whether sums of tensor cores are cut off, not rounded
    int32_t approximate;  // whether results of approximations are off by as much as they may be
};

// Whether they are, in what this thread runs.
extern thread_local bool approximate;

// Shared memory, and for each of its bytes who wrote and read it since when.
class SharedMemory {
  public:
    explicit SharedMemory(int32_t size);
    void new_block();
    void barrier();
    // Checks a read by a warp. Returns whether any of the bytes is undefined.
    bool read(uint32_t address, uint32_t count, int warp, uint8_t* out);
    void write(uint32_t address, uint32_t count, int warp, const uint8_t* data, bool undefined);
    // A copy is announced, which may write at any time until it is waited for, and then has been done.
    void begin_copy(uint32_t address, uint32_t count, int warp);
    void end_copy(uint32_t address, uint32_t count, int warp, const uint8_t* data, bool undefined);
    // The same as `read` for 16 bytes that a product of a warpgroup reads until it is waited for.
    bool begin_product(uint32_t address, int warp, uint8_t* out);
    void end_product(uint32_t address) { multiplied_[address / 16]--; }
    // Products see what the warp wrote, and what was written before the last barrier, only after this.
    void fence_products(int warp);

  private:
    void check(uint32_t address, uint32_t count) const;
    // Returns whether another warp used any of the bytes since the last barrier.
    bool check_write(uint32_t address, uint32_t count, int warp) const;
    void write_again(uint32_t address, uint32_t count, int warp, const uint8_t* data, uint32_t undefined);

    // Tags are the number of barriers so far, whether undefined, whether by several warps, and the warp.
    static constexpr uint32_t UNDEFINED = 0x80, SEVERAL = 0x40, WARP = 0x3f;
    static constexpr int SHIFT = 8;
    std::vector<uint8_t> bytes_;
    std::vector<uint32_t> written_, read_;
    std::vector<Mask> writers_;  // where there are several
    std::vector<uint8_t> copying_;
    std::vector<uint8_t> unfenced_;     // written since the last fence for products
    std::vector<uint16_t> multiplied_;  // products that still read these 16 bytes
    uint32_t now_ = 1, begin_ = 1;
    int32_t size_;
};

struct Copy {
    uint32_t address;
    uint32_t count;
    bool undefined;
    std::array<uint8_t, 16> data;
};

// Products of a warpgroup that were issued together: the 16 bytes that they read.
struct Products {
    std::vector<uint32_t> addresses;
    int64_t number = 0;
};
// A sum in a register that a product may still write: which lanes will be undefined, and the group of the product.
struct Pending {
    Mask undefined;
    int64_t group;
};

struct Block;

struct Warp {
    Block* block = nullptr;
    std::vector<uint8_t> registers;
    const uint8_t* constants = nullptr;
    int number = 0;
    Mask live = ALL;     // lanes that have not ended
    Mask active = ALL;   // lanes at `pc`
    bool diverged = false;
    int32_t pc = 0;
    std::array<int32_t, LANES> pcs{};
    int64_t steps = 0;
    std::vector<Copy> copies;               // since the last group was committed
    std::deque<std::vector<Copy>> groups;   // committed, and not yet waited for
    std::deque<Products> products;  // those not yet waited for; the last group is not yet committed
    std::map<int32_t, Pending> sums;  // by the offset of the register
    int64_t product_groups = 0;     // so far
    bool products_fenced = false;   // since the last group was committed
    Clock known;     // what has happened before in other warps and blocks
    Clock pending;   // what will have, after the next fence
    Clock fenced;    // what had happened before the last fence, which later stores release
    uint32_t tick = 0;  // releases since the last barrier

    template <class T>
    T* value(const Operand& o) {
        return reinterpret_cast<T*>(place(o, sizeof(T)));
    }
    uint8_t* place(const Operand& o, int size) {
        uint8_t* inside = const_cast<uint8_t*>(constants) + o.offset + constant_offset(size);
        return o.constant ? inside : registers.data() + o.offset;
    }
    Mask& undefined(const Operand& o, int size) {
        return *reinterpret_cast<Mask*>(place(o, size) + (size ? size * LANES : 4));
    }
    Mask& predicate(const Operand& o) { return *reinterpret_cast<Mask*>(place(o, 0)); }

    // Sets the lanes of `m`.
    template <class T>
    void assign(const Operand& o, const T* values, Mask undefined_lanes, Mask m) {
        T* to = value<T>(o);
        if (m == ALL) {
            std::memcpy(to, values, sizeof(T) * LANES);
        } else {
            for (int l = 0; l < LANES; l++) to[l] = m >> l & 1 ? values[l] : to[l];
        }
        Mask& bits = undefined(o, sizeof(T));
        bits = (bits & ~m) | (undefined_lanes & m);
    }
    void assign_predicate(const Operand& o, Mask values, Mask undefined_lanes, Mask m) {
        Mask& to = predicate(o);
        to = (to & ~m) | (values & m);
        Mask& bits = undefined(o, 0);
        bits = (bits & ~m) | (undefined_lanes & m);
    }
    // The addresses of all lanes, of 4 or 8 bytes. Throws Fault if one of `m` is undefined.
    void addresses(const Operand& o, Mask m, uint64_t* out);

    // Adds to a clock all that has happened before, and what this warp did.
    void release(Clock& into);
    void fence();

    void start(int number_of_warp, Block& owner);
    // Runs to the next barrier or to the end; returns whether it is at a barrier.
    bool run();

  private:
    void select();
    void advance(Mask jumping, int32_t target);
    void end(Mask lanes);
};

struct Block {
    const Program& program;
    const Options& options;
    GlobalMemory& global;
    SharedMemory shared;
    const uint8_t* parameters;
    uint64_t parameter_bytes;
    uint64_t* counts;  // of every instruction, in warps
    std::vector<Warp> warps;
    std::mt19937_64 random;
    uint32_t index[3] = {}, grid[3] = {};
    int running_warp = 0;
    uint32_t number = 0;  // from 1 on, in the order in which blocks run
    uint32_t epoch = 0;   // barriers so far

    Block(const Program& p, const Options& o, GlobalMemory& g);
    void run(uint32_t x, uint32_t y, uint32_t z);
    // At a barrier, every warp learns what the others know.
    void share_clocks();
};

// All kinds of instructions there are, from the files of this folder.
const std::vector<Kind>& kinds();
void add_integers(std::vector<Kind>& all);
void add_singles_and_halves(std::vector<Kind>& all);
void add_selections(std::vector<Kind>& all);
void add_conversions(std::vector<Kind>& all);
void add_memory(std::vector<Kind>& all);
void add_matrices(std::vector<Kind>& all);
void add_warpgroups(std::vector<Kind>& all);

}  // namespace ptx

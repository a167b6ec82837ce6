// Global memory, and for each of its words who wrote and read it when: accesses that nothing orders are races.
//
// Blocks run one after another, in any order. What one of them does happens before what another one does only where a
// release and an acquire say so; within a block, barriers say so too. Lanes of a warp are taken to be one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

struct Warp;

// An access: the block that made it, from 1 on in the order in which blocks run, and when. A time consists of the number
// of barriers before it, of releases by the warp since then, of the warp, and of whether other warps did the same since
// that barrier.
struct Use {
    static constexpr uint32_t WARP_BITS = 5, TICK_BITS = 6, SEVERAL = 1;
    static constexpr uint32_t EPOCH_SHIFT = 1 + WARP_BITS + TICK_BITS;
    static constexpr uint32_t MOST_TICKS = (1u << TICK_BITS) - 1, MOST_EPOCHS = (1u << (32 - EPOCH_SHIFT)) - 1;

    uint32_t block = 0;  // 0: nobody
    uint32_t time = 0;

    uint32_t epoch() const { return time >> EPOCH_SHIFT; }
    uint32_t warp() const { return time >> 1 & ((1u << WARP_BITS) - 1); }
    bool several() const { return time & SEVERAL; }
    static uint32_t time_of(uint32_t epoch, uint32_t tick, uint32_t warp) {
        return epoch << EPOCH_SHIFT | tick << (1 + WARP_BITS) | warp << 1;
    }
};

// What has happened before, in other blocks and warps.
class Clock {
  public:
    bool includes(Use use) const;
    void join(const Clock& other);
    // All that is before the last barrier before `now`, and what the warp of `now` did until then.
    void add(Use now);
    // What the warp of `now` did until then, alone.
    void add_only(Use now);
    bool empty() const { return seen_.empty(); }
    void clear() { seen_.clear(); }

  private:
    struct Seen {
        uint32_t epoch = 0;           // everything earlier
        std::vector<uint32_t> times;  // and until these times, what their warps did
    };
    std::map<uint32_t, Seen> seen_;  // by block
};

// How an atomic, or a load or store that is not weak, orders other accesses: bits as program.py gives them.
struct Order {
    static constexpr uint32_t ACQUIRE = 1, RELEASE = 2, WITHIN_BLOCK = 4;
    uint32_t bits;
    bool has(uint32_t bit) const { return bits & bit; }
};

struct Region {
    uint64_t begin;
    uint64_t end;
};

// What memory that was allocated and never written holds, by the address of 8 bytes.
inline uint64_t pattern(uint64_t address) {
    uint64_t mixed = (address + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return (mixed ^ mixed >> 31) * 0x94d049bb133111ebu;
}

// Memory that kernels may use: that of the tensors they are given. What is wrong with an access is thrown as a Fault.
class GlobalMemory {
  public:
    explicit GlobalMemory(std::vector<Region> regions);
    // Copies bytes to `out`. Returns whether any were never written.
    bool read(uint64_t address, uint32_t count, const Warp& w, uint8_t* out, const char* access = "a read");
    void write(uint64_t address, uint32_t count, const Warp& w, const uint8_t* data);
    // For an access to the place of `count` bytes that others may access at the same time.
    enum class Kind { LOAD, STORE, UPDATE };
    uint8_t* strong(uint64_t address, uint32_t count, Warp& w, Order order, Kind kind, const char* access);

  private:
    struct Word {
        Use write, read;
    };
    struct Page {
        bool bytes = false;  // whether words are of one byte, not of four
        std::vector<Word> words;
    };
    struct Strong {
        Clock released;
        std::vector<Use> users;
        uint32_t count = 0;  // bytes
        uint32_t only = 0;   // the block within which some of them are
    };
    uint8_t* at(uint64_t address, uint32_t count, const char* access);
    bool unwritten(uint64_t address, uint32_t count) const;
    Page& page(uint64_t number);
    // Calls `visit` with all words of an access, which lies in one page.
    template <class F>
    void words(uint64_t address, uint32_t count, F visit);
    void check_ordered(Use earlier, const Warp& w, uint64_t address, uint32_t count, const char* what);

    std::vector<Region> regions_;
    Region last_{0, 0};
    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
    uint64_t last_number_ = ~uint64_t(0);
    Page* last_page_ = nullptr;
    std::unordered_map<uint64_t, Strong> strong_;  // by address
};

}  // namespace ptx

// The checks of global memory.
#include "global.h"

#include <algorithm>

#include "emulator.h"

namespace ptx {
namespace {

constexpr uint64_t PAGE = 4096;
// Instead of a block: several that nothing orders, and accesses that are in `strong_`.
constexpr uint32_t BLOCKS = 0xffffffff, STRONG = 0xfffffffe;

std::string hex(uint64_t number) {
    char text[32];
    std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(number));
    return text;
}

std::string of_memory(uint64_t address, uint32_t count) {
    return " of " + std::to_string(count) + " bytes of global memory at " + hex(address);
}

Use now(const Warp& w) {
    return {w.block->number, Use::time_of(w.block->epoch, w.tick, uint32_t(w.number))};
}

}  // namespace

// --- what happened before ---------------------------------------------------------------------------------------------

bool Clock::includes(Use use) const {
    auto found = seen_.find(use.block);
    if (found == seen_.end()) return false;
    if (use.epoch() < found->second.epoch) return true;
    return !use.several() && std::any_of(found->second.times.begin(), found->second.times.end(), [&](uint32_t time) {
        return Use{0, time}.warp() == use.warp() && time >= use.time;
    });
}

void Clock::join(const Clock& other) {
    for (const auto& [block, theirs] : other.seen_) {
        Seen& ours = seen_[block];
        ours.epoch = std::max(ours.epoch, theirs.epoch);
        for (uint32_t time : theirs.times) {
            bool known = includes({block, time});
            if (!known) ours.times.push_back(time);
        }
        auto covered = [&](uint32_t time) { return Use{0, time}.epoch() < ours.epoch; };
        ours.times.erase(std::remove_if(ours.times.begin(), ours.times.end(), covered), ours.times.end());
    }
}

void Clock::add(Use now) {
    Seen& ours = seen_[now.block];
    ours.epoch = std::max(ours.epoch, now.epoch());
    ours.times.push_back(now.time);
}

void Clock::add_only(Use now) { seen_[now.block].times.push_back(now.time); }

void Warp::release(Clock& into) {
    if (tick == Use::MOST_TICKS) throw Fault("unsupported: so many releases between barriers");
    into.join(known);
    into.add(now(*this));
    tick++;
}

void Warp::fence() {
    known.join(pending);
    pending.clear();
    fenced.clear();
    release(fenced);
}

void Block::share_clocks() {
    Clock all;
    for (const Warp& w : warps) all.join(w.known);
    if (epoch == Use::MOST_EPOCHS) throw Fault("unsupported: so many barriers");
    epoch++;
    for (Warp& w : warps) {
        if (!all.empty()) w.known = all;
        w.tick = 0;
    }
}

// --- places -----------------------------------------------------------------------------------------------------------

GlobalMemory::GlobalMemory(std::vector<Region> regions) : regions_(std::move(regions)) {
    std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
    // Those that overlap or touch are one.
    std::vector<Region> merged;
    for (const Region& region : regions_) {
        if (!merged.empty() && region.begin < merged.back().end) {
            merged.back().end = std::max(merged.back().end, region.end);
        } else {
            merged.push_back(region);
        }
    }
    regions_ = std::move(merged);
}

uint8_t* GlobalMemory::at(uint64_t address, uint32_t count, const char* access) {
    if (address < last_.begin || address + count > last_.end) {
        auto after = std::upper_bound(
            regions_.begin(), regions_.end(), address, [](uint64_t a, const Region& r) { return a < r.begin; });
        if (after == regions_.begin() || address + count > (after - 1)->end || address + count < address) {
            std::string place = "no tensor is near";
            if (after != regions_.begin() && address >= (after - 1)->end) {
                const Region& before = *(after - 1);
                place = std::to_string(address - before.end) + " bytes after the end of a tensor of " +
                        std::to_string(before.end - before.begin);
            }
            if (after != regions_.begin() && address < (after - 1)->end) place = "it ends after the end of a tensor";
            if (after != regions_.end() && after->begin - address < 4096) {
                place += ", " + std::to_string(after->begin - address) + " bytes before the start of one";
            }
            throw Fault(std::string("out of bounds: ") + access + of_memory(address, count) + ": " + place);
        }
        last_ = *(after - 1);
    }
    if (address % count) throw Fault(std::string("misaligned: ") + access + of_memory(address, count));
    return reinterpret_cast<uint8_t*>(address);
}

bool GlobalMemory::unwritten(uint64_t address, uint32_t count) const {
    for (uint64_t word = address & ~uint64_t(7); word < address + count; word += 8) {
        if (word < last_.begin || word + 8 > last_.end) continue;
        uint64_t bits;
        std::memcpy(&bits, reinterpret_cast<const void*>(word), 8);
        if (bits == pattern(word)) return true;
    }
    return false;
}

GlobalMemory::Page& GlobalMemory::page(uint64_t number) {
    if (number != last_number_) {
        std::unique_ptr<Page>& found = pages_[number];
        if (!found) {
            found = std::make_unique<Page>();
            found->words.resize(PAGE / 4);
        }
        last_number_ = number, last_page_ = found.get();
    }
    return *last_page_;
}

template <class F>
void GlobalMemory::words(uint64_t address, uint32_t count, F visit) {
    Page& own = page(address / PAGE);
    if (!own.bytes && count < 4) {
        std::vector<Word> bytes(PAGE);
        for (uint64_t at = 0; at < PAGE; at++) bytes[at] = own.words[at / 4];
        own.words = std::move(bytes);
        own.bytes = true;
    }
    const uint64_t size = own.bytes ? 1 : 4, first = address % PAGE / size;
    for (uint64_t at = first; at < first + count / size; at++) visit(own.words[at]);
}

// --- accesses ---------------------------------------------------------------------------------------------------------

void GlobalMemory::check_ordered(Use earlier, const Warp& w, uint64_t address, uint32_t count, const char* what) {
    if (!earlier.block) return;
    const Use mine = now(w);
    if (earlier.block == mine.block) {
        if (earlier.epoch() < mine.epoch() || (!earlier.several() && earlier.warp() == mine.warp())) return;
    }
    if (earlier.block == STRONG) {
        for (const auto& [place, others] : strong_) {
            if (place + others.count <= address || place >= address + count) continue;
            for (Use use : others.users) check_ordered(use, w, address, count, what);
        }
        return;
    }
    if (earlier.block != BLOCKS && w.known.includes(earlier)) return;
    const bool same = earlier.block == mine.block;
    throw Fault(std::string("race: ") + what + of_memory(address, count) + ", in another " +
                (same ? "warp without a barrier between" : "block without a release and an acquire between"));
}

bool GlobalMemory::read(uint64_t address, uint32_t count, const Warp& w, uint8_t* out, const char* access) {
    const uint8_t* place = at(address, count, access);
    const Use mine = now(w);
    words(address, count, [&](Word& word) {
        check_ordered(word.write, w, address, count, "a read and a write");
        Use& last = word.read;
        if (last.block == mine.block) {
            const bool together = last.epoch() == mine.epoch() && (last.several() || last.warp() != mine.warp());
            last.time = mine.time | (together ? Use::SEVERAL : 0);
        } else if (last.block != BLOCKS) {
            last = !last.block || w.known.includes(last) ? mine : Use{BLOCKS, 0};
        }
    });
    std::memcpy(out, place, count);
    return unwritten(address, count);
}

void GlobalMemory::write(uint64_t address, uint32_t count, const Warp& w, const uint8_t* data) {
    uint8_t* place = at(address, count, "a write");
    words(address, count, [&](Word& word) {
        check_ordered(word.write, w, address, count, "two writes");
        check_ordered(word.read, w, address, count, "a write and a read");
        if (word.write.block == STRONG) strong_.erase(address);
        word = {now(w), {}};
    });
    std::memcpy(place, data, count);
}

uint8_t* GlobalMemory::strong(
    uint64_t address, uint32_t count, Warp& w, Order order, Kind kind, const char* access) {
    uint8_t* place = at(address, count, access);
    if (kind != Kind::STORE && unwritten(address, count)) {
        throw Fault(std::string("uninitialized: ") + access + of_memory(address, count) + ", which nobody wrote");
    }
    words(address, count, [&](Word& word) {
        if (word.write.block != STRONG) check_ordered(word.write, w, address, count, "an atomic and a write");
        if (kind != Kind::LOAD) check_ordered(word.read, w, address, count, "an atomic and a read");
        word.write = {STRONG, 0};
    });
    Strong& found = strong_[address];
    found.count = count;
    const Use mine = now(w);
    if (order.has(Order::WITHIN_BLOCK)) found.only = mine.block;
    for (Use use : found.users) {
        if (found.only && (use.block != mine.block || found.only != mine.block)) {
            check_ordered(use, w, address, count, "two atomics, one of them with the scope of a block,");
        }
    }
    found.users.push_back(mine);
    if (kind != Kind::STORE) (order.has(Order::ACQUIRE) ? w.known : w.pending).join(found.released);
    if (kind == Kind::STORE) found.released.clear();
    if (kind != Kind::LOAD) {
        if (order.has(Order::RELEASE)) w.release(found.released);
        else if (!w.fenced.empty()) found.released.join(w.fenced), found.released.add_only(mine);
    }
    return place;
}

}  // namespace ptx

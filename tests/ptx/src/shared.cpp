// Shared memory: its bounds, who wrote and read its bytes since the last barrier, and what is still copied or multiplied.
#include <algorithm>

#include "emulator.h"

namespace ptx {
namespace {

std::string where(uint32_t address, uint32_t count) {
    return " of shared memory, " + std::to_string(count) + " bytes at " + std::to_string(address);
}

}  // namespace

SharedMemory::SharedMemory(int32_t size)
    : bytes_(size), written_(size), read_(size), writers_(size), copying_(size), unfenced_(size), multiplied_(size / 16 + 1),
      size_(size) {}

void SharedMemory::new_block() {
    barrier();
    begin_ = now_;
    std::fill(bytes_.begin(), bytes_.end(), 0xa5);
    std::fill(copying_.begin(), copying_.end(), 0);
    std::fill(multiplied_.begin(), multiplied_.end(), 0);
}

void SharedMemory::barrier() {
    if (++now_ < 1u << 23) return;
    // Tags have no more room: what was written stays written, before everything.
    for (uint32_t& tag : written_) tag = tag >> SHIFT < begin_ ? 0 : (tag & ((1u << SHIFT) - 1)) | 1u << SHIFT;
    std::fill(read_.begin(), read_.end(), 0);
    now_ = 2, begin_ = 1;
}

void SharedMemory::check(uint32_t address, uint32_t count) const {
    if (uint64_t(address) + count > uint64_t(size_)) {
        throw Fault("out of bounds: " + std::to_string(count) + " bytes at " + std::to_string(address) + " of " +
                    std::to_string(size_) + " bytes of shared memory");
    }
    if (address % count) {
        throw Fault("misaligned: " + std::to_string(count) + " bytes of shared memory at " + std::to_string(address));
    }
}

bool SharedMemory::read(uint32_t address, uint32_t count, int warp, uint8_t* out) {
    check(address, count);
    const uint32_t *written = written_.data() + address, mine = uint32_t(warp);
    uint32_t* readers = read_.data() + address;
    const uint32_t none = begin_ << SHIFT, now = now_ << SHIFT;
    uint32_t raced = 0, missing = 0, undefined = 0, copied = 0;
    for (uint32_t b = 0; b < count; b++) {
        uint32_t tag = written[b];
        missing |= tag < none;
        if (tag >= now && (tag & ~UNDEFINED) != (now | mine)) raced |= !(tag & SEVERAL) || !(writers_[address + b] >> mine & 1);
        undefined |= tag & UNDEFINED;
        copied |= copying_[address + b];
        uint32_t reader = readers[b];
        readers[b] = reader >= now && reader != (now | mine) ? now | SEVERAL : now | mine;
    }
    if (copied) throw Fault("unfinished copy: a read" + where(address, count) + ", which cp.async may still write");
    if (missing) throw Fault("uninitialized: a read" + where(address, count) + ", which nobody wrote");
    if (raced) throw Fault("race: a read" + where(address, count) + ", which another warp wrote since the last barrier");
    std::memcpy(out, bytes_.data() + address, count);
    return undefined;
}

bool SharedMemory::check_write(uint32_t address, uint32_t count, int warp) const {
    check(address, count);
    const uint32_t now = now_ << SHIFT, mine = uint32_t(warp);
    uint32_t raced = 0, copied = 0, multiplied = 0;
    for (uint32_t b = address; b < address + count; b++) {
        multiplied |= multiplied_[b / 16];
        raced |= written_[b] >= now && (written_[b] & ~UNDEFINED) != (now | mine);
        raced |= read_[b] >= now && read_[b] != (now | mine);
        copied |= copying_[b];
    }
    if (copied) throw Fault("unfinished copy: a write" + where(address, count) + ", which cp.async may still write");
    if (multiplied) throw Fault("unfinished product: a write" + where(address, count) + ", which wgmma may still read");
    return raced;
}

bool SharedMemory::begin_product(uint32_t address, int warp, uint8_t* out) {
    const bool undefined = read(address, 16, warp, out);
    const uint8_t* unfenced = unfenced_.data() + address;
    if (std::any_of(unfenced, unfenced + 16, [](uint8_t flag) { return flag; })) {
        throw Fault("race: wgmma reads" + where(address, 16) + ", with no fence.proxy.async since they were written");
    }
    multiplied_[address / 16]++;
    return undefined;
}

void SharedMemory::fence_products(int warp) {
    const uint32_t now = now_ << SHIFT, mine = now | uint32_t(warp);
    for (int32_t b = 0; b < size_; b++) {
        if (written_[b] < now || (written_[b] & ~UNDEFINED) == mine || (written_[b] & SEVERAL)) unfenced_[b] = 0;
    }
}

// Several warps may write the same since a barrier: a layout can have the same element in several of them.
void SharedMemory::write_again(uint32_t address, uint32_t count, int warp, const uint8_t* data, uint32_t undefined) {
    const uint32_t now = now_ << SHIFT;
    for (uint32_t b = 0; b < count; b++) {
        uint32_t& tag = written_[address + b];
        if (tag < now || bytes_[address + b] != data[b]) {
            throw Fault("race: a write" + where(address, count) + ", which another warp used since the last barrier");
        }
        Mask& writers = writers_[address + b];
        if (!(tag & SEVERAL)) writers = 1u << (tag & WARP);
        writers |= 1u << warp;
        tag |= SEVERAL | undefined;
    }
}

void SharedMemory::write(uint32_t address, uint32_t count, int warp, const uint8_t* data, bool undefined) {
    const uint32_t flag = undefined ? UNDEFINED : 0;
    if (check_write(address, count, warp)) return write_again(address, count, warp, data, flag);
    std::memcpy(bytes_.data() + address, data, count);
    std::fill_n(written_.begin() + address, count, now_ << SHIFT | flag | uint32_t(warp));
    std::fill_n(unfenced_.begin() + address, count, 1);
}

void SharedMemory::begin_copy(uint32_t address, uint32_t count, int warp) {
    if (check_write(address, count, warp)) {
        throw Fault("race: a copy to" + where(address, count) + ", which another warp used since the last barrier");
    }
    std::fill_n(copying_.begin() + address, count, 1);
    std::fill_n(bytes_.begin() + address, count, 0xa5);
}

void SharedMemory::end_copy(uint32_t address, uint32_t count, int warp, const uint8_t* data, bool undefined) {
    std::fill_n(copying_.begin() + address, count, 0);
    std::memcpy(bytes_.data() + address, data, count);
    std::fill_n(written_.begin() + address, count, now_ << SHIFT | (undefined ? UNDEFINED : 0) | uint32_t(warp));
    std::fill_n(unfenced_.begin() + address, count, 1);
}

}  // namespace ptx

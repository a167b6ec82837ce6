// The instructions that use memory.
#include <algorithm>

#include "emulator.h"

namespace ptx {

void Warp::addresses(const Operand& o, Mask m, uint64_t* out) {
    int size = o.size;
    if (undefined(o, size) & m) throw Fault("undefined: an address depends on a value that was never written");
    if (size == 8) {
        const uint64_t* in = value<uint64_t>(o);
        for (int l = 0; l < LANES; l++) out[l] = in[l] + uint64_t(o.displacement);
    } else {
        const uint32_t* in = value<uint32_t>(o);
        for (int l = 0; l < LANES; l++) out[l] = uint32_t(in[l] + uint32_t(o.displacement));
    }
}

namespace {

// --- loads and stores -------------------------------------------------------------------------------------------------

constexpr int MAX_BYTES = 32, MAX_PARTS = 32;  // of a lane

void set_register(Warp& w, const Operand& o, const uint64_t* values, Mask undefined, Mask m) {
    if (o.size == 8) return w.assign(o, values, undefined, m);
    auto narrow = [&](auto zero) {
        decltype(zero) out[LANES];
        for (int l = 0; l < LANES; l++) out[l] = decltype(zero)(values[l]);
        w.assign(o, out, undefined, m);
    };
    if (o.size == 4) return narrow(uint32_t());
    if (o.size == 2) return narrow(uint16_t());
    narrow(uint8_t());
}

uint64_t register_bits(Warp& w, const Operand& o, int size, int lane) {
    int own = o.constant ? size : o.size;
    uint64_t bits = 0;
    std::memcpy(&bits, w.place(o, own) + own * lane, own);
    return bits;
}

// T: unsigned to fill wider registers with zeros, signed to repeat the sign.
template <class T>
void unpack_lanes(Warp& w, const Instruction& i, const uint8_t (*data)[MAX_BYTES], const Mask* undefined, Mask m) {
    for (int part = 0; part < i.count - 1; part++) {
        uint64_t values[LANES];
        for (int l = 0; l < LANES; l++) {
            T one;
            std::memcpy(&one, data[l] + part * sizeof(T), sizeof(T));
            values[l] = uint64_t(int64_t(one));
            if (!std::is_signed_v<T>) values[l] = one;
        }
        set_register(w, i.operands[part], values, undefined[part], m);
    }
}

template <class T, bool SHARED>
void load(Warp& w, const Instruction& i, Mask m) {
    const uint32_t count = uint32_t((i.count - 1) * sizeof(T));
    uint64_t address[LANES];
    w.addresses(i.operands[i.count - 1], m, address);
    alignas(32) uint8_t data[LANES][MAX_BYTES];
    auto read = [&](uint64_t at, uint32_t size, uint8_t* out) -> bool {
        return SHARED ? w.block->shared.read(uint32_t(at), size, w.number, out) : w.block->global.read(at, size, w, out);
    };
    Mask undefined[MAX_PARTS] = {};
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1) || !read(address[l], count, data[l])) continue;
        for (int part = 0; part < i.count - 1; part++) {  // which of them it is
            const uint32_t at = uint32_t(part * sizeof(T));
            undefined[part] |= Mask(read(address[l] + at, sizeof(T), data[l] + at)) << l;
        }
    }
    unpack_lanes<T>(w, i, data, undefined, m);
}

// Where lanes of one store meet, nobody knows whose value stays.
void check_lanes(const uint64_t* address, const uint8_t (*data)[MAX_BYTES], uint32_t count, Mask m) {
    uint64_t end = 0;
    bool apart = true;
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        apart &= address[l] >= end;
        end = address[l] + count;
    }
    for (int a = 0; a < LANES && !apart; a++) {
        for (int b = a + 1; b < LANES; b++) {
            if (!(m >> a & m >> b & 1) || address[a] != address[b]) continue;
            if (std::memcmp(data[a], data[b], count)) throw Fault("race: lanes of a store write different values");
        }
    }
}

template <class T, bool SHARED>
void store(Warp& w, const Instruction& i, Mask m) {
    const int parts = i.count - 1;
    const uint32_t count = uint32_t(parts * sizeof(T));
    uint64_t address[LANES];
    w.addresses(i.operands[parts], m, address);
    Mask undefined[MAX_PARTS] = {}, any = 0;
    for (int part = 0; part < parts; part++) {
        const Operand& o = i.operands[part];
        any |= undefined[part] = w.undefined(o, o.constant ? sizeof(T) : o.size);
    }
    if (!SHARED && (any & m)) throw Fault("undefined: a value that was never written goes to global memory");
    alignas(32) uint8_t data[LANES][MAX_BYTES];
    for (int part = 0; part < parts; part++) {
        for (int l = 0; l < LANES; l++) {
            uint64_t bits = register_bits(w, i.operands[part], sizeof(T), l);
            std::memcpy(data[l] + part * sizeof(T), &bits, sizeof(T));
        }
    }
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        if (SHARED) {
            w.block->shared.write(uint32_t(address[l]), count, w.number, data[l], false);
            for (int part = 0; part < parts && (any >> l & 1); part++) {
                if (!(undefined[part] >> l & 1)) continue;
                const uint32_t at = uint32_t(part * sizeof(T));
                w.block->shared.write(uint32_t(address[l]) + at, sizeof(T), w.number, data[l] + at, true);
            }
        } else {
            w.block->global.write(address[l], count, w, data[l]);
        }
    }
    check_lanes(address, data, count, m);
}

// From the offset of a parameter, or from an address made of it.
template <class T>
void load_parameter(Warp& w, const Instruction& i, Mask m) {
    uint64_t address[LANES], values[LANES] = {};
    w.addresses(i.operands[1], m, address);
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        if (address[l] + sizeof(T) > w.block->parameter_bytes) throw Fault("out of bounds: a read of parameters");
        T one;
        std::memcpy(&one, w.block->parameters + address[l], sizeof(T));
        values[l] = std::is_signed_v<T> ? uint64_t(int64_t(one)) : uint64_t(one);
    }
    set_register(w, i.operands[0], values, 0, m);
}

// --- asynchronous copies ----------------------------------------------------------------------------------------------

// MARKED: bytes that are not copied are undefined instead of 0. No GPU has this: it shows that nothing depends on them.
template <bool MARKED>
void copy(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    uint64_t to[LANES], from[LANES];
    w.addresses(o[0], m, to);
    w.addresses(o[1], m, from);
    const uint32_t count = w.value<uint32_t>(o[2])[0];
    if (i.count > 3 && (w.undefined(o[3], 4) & m)) throw Fault("undefined: the number of bytes was never written");
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        uint32_t present = i.count > 3 ? w.value<uint32_t>(o[3])[l] : count;
        if (present > count) throw Fault("out of bounds: cp.async of more bytes than it is for");
        Copy one{uint32_t(to[l]), count, MARKED && present < count, {}};
        if (present) {
            if (from[l] % count) throw Fault("misaligned: cp.async of " + std::to_string(count) + " bytes");
            const uint32_t step = present == count ? count : present % 4 ? 1 : 4;
            for (uint32_t at = 0; at < present; at += step) {
                one.undefined |= w.block->global.read(from[l] + at, step, w, one.data.data() + at, "a copy");
            }
        }
        w.block->shared.begin_copy(one.address, count, w.number);
        w.copies.push_back(one);
    }
}

void commit(Warp& w, const Instruction&, Mask) {
    w.groups.push_back(std::move(w.copies));
    w.copies.clear();
}

void finish(Warp& w, const std::vector<Copy>& copies) {
    for (const Copy& one : copies) w.block->shared.end_copy(one.address, one.count, w.number, one.data.data(), one.undefined);
}

void wait(Warp& w, const Instruction& i, Mask) {
    size_t allowed = w.value<uint32_t>(i.operands[0])[0];
    while (w.groups.size() > allowed) {
        finish(w, w.groups.front());
        w.groups.pop_front();
    }
}

void wait_for_all(Warp& w, const Instruction&, Mask) {
    for (const auto& group : w.groups) finish(w, group);
    w.groups.clear();
    finish(w, w.copies);
    w.copies.clear();
}

// --- atomics ----------------------------------------------------------------------------------------------------------

template <class T>
T sum(T a, T b) {
    return T(a + b);
}
template <class T>
T least(T a, T b) {
    return std::min(a, b);
}
template <class T>
T most(T a, T b) {
    return std::max(a, b);
}
template <class T>
T second(T, T b) {
    return b;
}

// The old value [, which `atom` returns], the value, the address, and the Order. Lanes follow each other.
template <auto F, bool RETURNS>
struct Atomic;
template <class T, T (*F)(T, T), bool RETURNS>
struct Atomic<F, RETURNS> {
    static void run(Warp& w, const Instruction& i, Mask m) {
        const Operand* o = i.operands + RETURNS;
        uint64_t address[LANES];
        w.addresses(o[1], m, address);
        if (w.undefined(o[0], sizeof(T)) & m) throw Fault("undefined: an atomic takes a value that was never written");
        T old[LANES];
        for (int l = 0; l < LANES; l++) {
            if (!(m >> l & 1)) continue;
            const Order order{w.value<uint32_t>(o[2])[0]};
            uint8_t* at = w.block->global.strong(address[l], sizeof(T), w, order, GlobalMemory::Kind::UPDATE, "an atomic");
            std::memcpy(&old[l], at, sizeof(T));
            T now = F(old[l], w.value<T>(o[0])[l]);
            std::memcpy(at, &now, sizeof(T));
        }
        if (RETURNS) w.assign(i.operands[0], old, 0, m);
    }
};

template <auto F>
void add_atomic(std::vector<Kind>& all, const std::string& name, const std::string& size) {
    all.push_back({"atom.global." + name, size + size + "8c", Atomic<F, true>::run});
    all.push_back({"red.global." + name, size + "8c", Atomic<F, false>::run});
}

// Loads and stores that others may see at once, such as ld.acquire: the value, the address, and the Order.
template <class T, bool STORES>
void strong(Warp& w, const Instruction& i, Mask m) {
    const Operand* o = i.operands;
    const auto kind = STORES ? GlobalMemory::Kind::STORE : GlobalMemory::Kind::LOAD;
    uint64_t address[LANES];
    w.addresses(o[1], m, address);
    if (STORES && (w.undefined(o[0], sizeof(T)) & m)) throw Fault("undefined: a value that was never written is stored");
    T values[LANES];
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        const Order order{w.value<uint32_t>(o[2])[0]};
        uint8_t* at = w.block->global.strong(address[l], sizeof(T), w, order, kind, STORES ? "a write" : "a read");
        if (STORES) std::memcpy(at, w.value<T>(o[0]) + l, sizeof(T));
        else std::memcpy(&values[l], at, sizeof(T));
    }
    if (!STORES) w.assign(o[0], values, 0, m);
}

void fence(Warp& w, const Instruction&, Mask) { w.fence(); }
void nothing(Warp&, const Instruction&, Mask) {}

void warp_barrier(Warp& w, const Instruction& i, Mask) {
    if (w.value<uint32_t>(i.operands[0])[0] != ALL) throw Fault("unsupported: a barrier for a part of a warp");
}

void policy(Warp& w, const Instruction& i, Mask m) {
    uint64_t none[LANES] = {};
    w.assign(i.operands[0], none, 0, m);
}

// Registers may be wider than what is loaded or stored.
template <bool SHARED>
void add_space(std::vector<Kind>& all, const std::string& space, const std::string& address) {
    auto add_pair = [&](const std::string& type, const std::string& of_values, Handler loads, Handler stores) {
        const std::string sizes = "*" + of_values + address;
        all.push_back({"ld." + space + "." + type, sizes, loads});
        all.push_back({"st." + space + "." + type, sizes, stores});
    };
    for (const std::string letter : {"b", "u"}) {
        add_pair(letter + "8", "1+", load<uint8_t, SHARED>, store<uint8_t, SHARED>);
        add_pair(letter + "16", "2+", load<uint16_t, SHARED>, store<uint16_t, SHARED>);
        add_pair(letter + "32", "4+", load<uint32_t, SHARED>, store<uint32_t, SHARED>);
        add_pair(letter + "64", "8", load<uint64_t, SHARED>, store<uint64_t, SHARED>);
    }
    add_pair("s8", "1+", load<int8_t, SHARED>, store<uint8_t, SHARED>);
    add_pair("s16", "2+", load<int16_t, SHARED>, store<uint16_t, SHARED>);
    add_pair("s32", "4+", load<int32_t, SHARED>, store<uint32_t, SHARED>);
    add_pair("s64", "8", load<int64_t, SHARED>, store<uint64_t, SHARED>);
    add_pair("f32", "4", load<uint32_t, SHARED>, store<uint32_t, SHARED>);
}

}  // namespace

void add_memory(std::vector<Kind>& all) {
    add_space<false>(all, "global", "8");
    add_space<true>(all, "shared", "4");
    for (const std::string letter : {"b", "u"}) {
        all.push_back({"ld.param." + letter + "8", "1+a", load_parameter<uint8_t>});
        all.push_back({"ld.param." + letter + "16", "2+a", load_parameter<uint16_t>});
        all.push_back({"ld.param." + letter + "32", "4+a", load_parameter<uint32_t>});
        all.push_back({"ld.param." + letter + "64", "8a", load_parameter<uint64_t>});
    }
    all.push_back({"ld.param.s8", "1+a", load_parameter<int8_t>});
    all.push_back({"ld.param.s16", "2+a", load_parameter<int16_t>});
    all.push_back({"ld.param.s32", "4+a", load_parameter<int32_t>});
    all.push_back({"ld.param.f32", "4a", load_parameter<uint32_t>});
    for (const std::string cached : {"ca", "cg"}) {
        all.push_back({"cp.async." + cached + ".shared.global", "48c", copy<false>});
        all.push_back({"cp.async." + cached + ".shared.global", "48c4", copy<false>});
        all.push_back({"cp.async." + cached + ".shared.global.marked", "48c4", copy<true>});
    }
    all.push_back({"cp.async.commit_group", "", commit, Flow::NEXT, true});
    all.push_back({"cp.async.wait_group", "c", wait, Flow::NEXT, true});
    all.push_back({"cp.async.wait_all", "", wait_for_all, Flow::NEXT, true});
    add_atomic<sum<uint32_t>>(all, "add.u32", "4"), add_atomic<sum<uint32_t>>(all, "add.s32", "4");
    add_atomic<sum<uint64_t>>(all, "add.u64", "8"), add_atomic<sum<float>>(all, "add.f32", "4");
    add_atomic<least<int32_t>>(all, "min.s32", "4"), add_atomic<least<uint32_t>>(all, "min.u32", "4");
    add_atomic<most<int32_t>>(all, "max.s32", "4"), add_atomic<most<uint32_t>>(all, "max.u32", "4");
    add_atomic<second<uint32_t>>(all, "exch.b32", "4"), add_atomic<second<uint64_t>>(all, "exch.b64", "8");
    for (const std::string letter : {"b", "u", "s"}) {
        all.push_back({"ld.strong.global." + letter + "32", "48c", strong<uint32_t, false>});
        all.push_back({"ld.strong.global." + letter + "64", "88c", strong<uint64_t, false>});
        all.push_back({"st.strong.global." + letter + "32", "48c", strong<uint32_t, true>});
        all.push_back({"st.strong.global." + letter + "64", "88c", strong<uint64_t, true>});
    }
    // Fences for the block alone order nothing between blocks, and barriers do more.
    for (const char* name : {"membar.cta", "fence.acq_rel.cta", "fence.sc.cta"}) all.push_back({name, "", nothing});
    for (const char* name : {"membar.gl", "membar.sys", "fence.acq_rel.gpu", "fence.acq_rel.sys", "fence.sc.gpu",
                             "fence.sc.sys"}) {
        all.push_back({name, "", fence});
    }
    all.push_back({"bar.warp.sync", "c", warp_barrier, Flow::NEXT, true});
    all.push_back({"createpolicy.fractional.L2::evict_first.b64", "8c", policy});
    all.push_back({"createpolicy.fractional.L2::evict_last.b64", "8c", policy});
}

}  // namespace ptx

// Control flow: lanes that part and meet again, warps that wait for each other, and blocks. The interface to Python.
#include <algorithm>
#include <memory>
#include <numeric>

#include "emulator.h"

namespace ptx {

// --- warps ------------------------------------------------------------------------------------------------------------

void Warp::start(int number_of_warp, Block& owner) {
    block = &owner;
    number = number_of_warp;
    const Program& program = owner.program;
    constants = program.constants.data();
    // A pattern that is no sensible number, and marked as undefined.
    registers.assign(program.register_bytes, 0xa5);
    int32_t at = 0;
    for (uint32_t size : program.sizes) {
        std::memset(registers.data() + at + (size ? size * LANES : 4), 0xff, 4);
        at += register_bytes(size);
    }
    auto set = [&](int which, auto value_of_lane) {
        if (program.special[which] < 0) return;
        uint32_t values[LANES];
        for (int l = 0; l < LANES; l++) values[l] = value_of_lane(l);
        assign(Operand{0, program.special[which], 4, 0, 0}, values, 0, ALL);
    };
    set(0, [&](int l) { return uint32_t(number * LANES + l); });
    for (int axis = 0; axis < 3; axis++) {
        set(1 + axis, [&](int) { return owner.index[axis]; });
        set(4 + axis, [&](int) { return owner.grid[axis]; });
    }
    live = active = ALL;
    diverged = false;
    pc = 0;
    steps = 0;
    copies.clear();
    groups.clear();
    products.clear();
    sums.clear();
    product_groups = 0;
    products_fenced = false;
    known.clear();
    pending.clear();
    fenced.clear();
    tick = 0;
}

// The lanes that are furthest behind come first, so that those that parted meet again.
void Warp::select() {
    if (!diverged) return;
    int32_t least = INT32_MAX;
    for (int l = 0; l < LANES; l++) {
        if (live >> l & 1) least = std::min(least, pcs[l]);
    }
    pc = least;
    active = 0;
    for (int l = 0; l < LANES; l++) active |= Mask((live >> l & 1) && pcs[l] == least) << l;
    diverged = active != live;
}

void Warp::advance(Mask jumping, int32_t target) {
    if (!diverged && (jumping == 0 || jumping == active)) {
        pc = jumping ? target : pc + 1;
        return;
    }
    if (!diverged) pcs.fill(pc);
    for (int l = 0; l < LANES; l++) {
        if (active >> l & 1) pcs[l] = jumping >> l & 1 ? target : pc + 1;
    }
    diverged = true;
    select();
}

void Warp::end(Mask lanes) {
    const bool all = lanes == active;
    if (!diverged) pcs.fill(pc);
    for (int l = 0; l < LANES; l++) {
        if (active >> l & 1) pcs[l] = pc + 1;
    }
    live &= ~lanes;
    if (!live) return;
    if (all && !diverged) return;
    diverged = true;
    select();
}

bool Warp::run() {
    const Program& program = block->program;
    while (live) {
        const Instruction& i = program.code[pc];
        Mask m = active;
        if (i.guard >= 0) {
            const Operand guard{0, i.guard, 0, 0, 0};
            if (undefined(guard, 0) & m) throw Fault("undefined: a condition depends on a value that was never written");
            m &= i.negated ? ~predicate(guard) : predicate(guard);
        }
        block->counts[pc]++;
        if (++steps > block->options.limit) throw Fault("endless: the limit of instructions is reached");
        switch (i.flow) {
            case Flow::NEXT:
                if (i.collective && m != ALL) throw Fault("divergence: not all lanes of the warp take part");
                if (m) i.handler(*this, i, m);
                if (diverged) advance(0, 0);
                else pc++;
                break;
            case Flow::BRANCH:
                advance(m, i.target);
                break;
            case Flow::EXIT:
                if (m) end(m);
                else advance(0, 0);
                break;
            case Flow::BARRIER:
                if (m != ALL) throw Fault("divergence: not all lanes of the warp are at the barrier");
                return true;
        }
    }
    return false;
}

// --- blocks -----------------------------------------------------------------------------------------------------------

Block::Block(const Program& p, const Options& o, GlobalMemory& g)
    : program(p), options(o), global(g), shared(p.shared), warps(p.threads / LANES), random(o.seed) {}

void Block::run(uint32_t x, uint32_t y, uint32_t z) {
    index[0] = x, index[1] = y, index[2] = z;
    number++;
    epoch = 0;
    shared.new_block();
    std::vector<int> running(warps.size());
    std::iota(running.begin(), running.end(), 0);
    for (size_t w = 0; w < warps.size(); w++) warps[w].start(int(w), *this);
    while (true) {
        if (options.seed) std::shuffle(running.begin(), running.end(), random);
        size_t waiting = 0;
        for (int w : running) {
            running_warp = w;
            waiting += warps[w].run();
        }
        if (!waiting) return;
        for (int w : running) {
            running_warp = w;
            if (!warps[w].live) throw Fault("divergence: the warp ended while others wait at a barrier");
            if (warps[w].pc != warps[running[0]].pc) throw Fault("divergence: warps wait at different barriers");
        }
        for (int w : running) warps[w].pc++;
        shared.barrier();
        share_clocks();
    }
}

thread_local bool approximate = false;

const std::vector<Kind>& kinds() {
    static const std::vector<Kind> all = [] {
        std::vector<Kind> made;
        auto nothing = [](Warp&, const Instruction&, Mask) {};
        made.push_back({"bra", "", nothing, Flow::BRANCH});
        made.push_back({"ret", "", nothing, Flow::EXIT});
        made.push_back({"exit", "", nothing, Flow::EXIT});
        made.push_back({"bar.sync", "0", nothing, Flow::BARRIER});
        made.push_back({"trap", "", [](Warp&, const Instruction&, Mask) { throw Fault("trap: the program gives up"); }});
        add_integers(made);
        add_singles_and_halves(made);
        add_selections(made);
        add_conversions(made);
        add_memory(made);
        add_matrices(made);
        add_warpgroups(made);
        return made;
    }();
    return all;
}

namespace {

// See Kind; '0' is the constant 0.
bool fits(char wanted, bool or_wider, const Operand& o, const Program& program) {
    if (wanted == 'c') return o.constant;
    if (wanted == '0') return o.constant && !program.constants[o.offset];
    if (wanted == 'a') return o.constant || o.size >= 4;
    if (o.constant) return true;
    if (wanted == 'p') return o.size == 0;
    return or_wider ? o.size >= wanted - '0' : o.size == wanted - '0';
}

bool matches(const std::string& sizes, const Operand* o, int count, const Program& program) {
    const bool several = !sizes.empty() && sizes[0] == '*';
    size_t at = several;
    int length = 0;
    for (char letter : sizes) length += letter != '+' && letter != '*';
    if (several ? count < length : count != length) return false;
    for (int n = 0; n < count; n++) {
        const bool wider = at + 1 < sizes.size() && sizes[at + 1] == '+';
        if (!fits(sizes[at], wider, o[n], program)) return false;
        // The first one fits as many as are left over.
        if (!several || n >= count - length) at += 1 + wider;
    }
    return true;
}

void set_message(char* message, int32_t room, const std::string& text) {
    std::snprintf(message, size_t(room), "%s", text.c_str());
}

}  // namespace
}  // namespace ptx

// --- for Python -------------------------------------------------------------------------------------------------------

using namespace ptx;

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// An instruction as Python gives it; `first` is the number of its first operand.
struct Line {
    const char* name;
    int32_t first, count, guard, negated, target;
};

// Returns a program, or nullptr with `failed` set to the number of a line that is not known.
EXPORTED void* ptx_program(
    const Line* lines, int32_t line_count, const Operand* operands, int32_t operand_count, const uint8_t* constants,
    int32_t constant_bytes, const uint32_t* sizes, int32_t size_count, const int32_t* special, int32_t threads,
    int32_t shared, int32_t* failed) {
    auto program = std::make_unique<Program>();
    program->operands.assign(operands, operands + operand_count);
    program->constants.assign(constants, constants + constant_bytes);
    program->sizes.assign(sizes, sizes + size_count);
    for (uint32_t size : program->sizes) program->register_bytes += register_bytes(int(size));
    std::copy(special, special + 7, program->special.begin());
    program->threads = threads;
    program->shared = shared;
    for (int32_t n = 0; n < line_count; n++) {
        const Line& line = lines[n];
        const Operand* own = program->operands.data() + line.first;
        const Kind* found = nullptr;
        for (const Kind& kind : kinds()) {
            if (kind.name == line.name && matches(kind.sizes, own, line.count, *program)) {
                found = &kind;
                break;
            }
        }
        if (!found) {
            *failed = n;
            return nullptr;
        }
        program->code.push_back(
            {found->handler, own, line.count, line.guard, line.negated != 0, found->collective, found->flow, line.target});
    }
    return program.release();
}

// Fills memory with what marks it as never written.
EXPORTED void ptx_fill(uint64_t begin, uint64_t end) {
    for (uint64_t at = (begin + 7) & ~uint64_t(7); at + 8 <= end; at += 8) {
        const uint64_t bits = pattern(at);
        std::memcpy(reinterpret_cast<void*>(at), &bits, 8);
    }
}

EXPORTED void ptx_free(void* program) { delete static_cast<Program*>(program); }

// Runs a grid. Returns 0, or 1 with `message` and `failed` set: the instruction, the block's x, y and z, and the warp.
EXPORTED int32_t ptx_run(
    void* program, const uint32_t* grid, const uint8_t* parameters, int32_t parameter_bytes, const Region* regions,
    int32_t region_count, const Options* options, uint64_t* counts, char* message, int32_t room, int32_t* failed) {
    const Program& p = *static_cast<Program*>(program);
    approximate = options->approximate;
    GlobalMemory global(std::vector<Region>(regions, regions + region_count));
    Block block(p, *options, global);
    block.parameters = parameters;
    block.parameter_bytes = uint64_t(parameter_bytes);
    block.counts = counts;
    std::copy(grid, grid + 3, block.grid);
    std::vector<uint64_t> order(uint64_t(grid[0]) * grid[1] * grid[2]);
    std::iota(order.begin(), order.end(), 0);
    if (options->seed) std::shuffle(order.begin(), order.end(), block.random);
    for (uint64_t number : order) {
        try {
            block.run(uint32_t(number % grid[0]), uint32_t(number / grid[0] % grid[1]), uint32_t(number / grid[0] / grid[1]));
        } catch (const Fault& fault) {
            set_message(message, room, fault.what());
            const Warp& warp = block.warps[block.running_warp];
            const int32_t place[5] = {
                warp.pc, int32_t(block.index[0]), int32_t(block.index[1]), int32_t(block.index[2]), warp.number};
            std::copy(place, place + 5, failed);
            return 1;
        }
    }
    return 0;
}
}

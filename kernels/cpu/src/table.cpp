// The kernel table of one instruction set.

#include "kernels.h"

namespace aiakq {
namespace ISA {
namespace {

template <class Op, void (*KERNEL)(const Op&, Worker&)> void run(const void* op, Worker& worker) {
  KERNEL(*(const Op*)op, worker);
}

template <class Op> int64_t scratch(const void* op) { return scratch_bytes(*(const Op*)op); }

int64_t no_scratch(const void*) { return 0; }

}  // namespace

extern const KernelTable table;
// constexpr, because initialization code would also run on machines without this instruction set.
constexpr KernelTable table = {
    {
#define OP(name, Name) run<Name, name>,
#include "ops.def"
    },
    {
#define OP(name, Name) no_scratch,
#define OP_WITH_SCRATCH(name, Name) scratch<Name>,
#include "ops.def"
    },
};

}  // namespace ISA
}  // namespace aiakq

// The operations of one instruction set.

#include "kernels.h"

#define TEXT_OF(word) #word
#define TEXT(word) TEXT_OF(word)

namespace aiakq {
namespace ISA {

extern const Table table;
const Table table = {TEXT(ISA), {linear, dense, embedding, norm, rotary, attention, gate, sample, feedback},
                      linear_scratch, dense_scratch, attention_scratch};

}  // namespace ISA
}  // namespace aiakq

// Copies parts of rows.

#include <string.h>

#include "kernels.h"

namespace aiakq {
namespace ISA {

void copy(const Copy& op, Worker& worker) {
  parallel_for(worker, op.m, chunk_size(worker, op.m, 8), [&](int64_t row) {
    for (int64_t i = 0; i < op.batch; i++)
      memcpy((uint8_t*)op.y + row * op.y_stride + i * op.y_batch_stride,
             (const uint8_t*)op.x + row * op.x_stride + i * op.x_batch_stride, op.bytes);
  });
}

}  // namespace ISA
}  // namespace aiakq

// Products of quantized weights (linear_product.h): activations rounded in blocks times integer codes.

#include "linear_product.h"

namespace aiakq {
namespace ISA {

Product blocks_product(const Linear& op) {
  return product_of<BLOCKS>(op);
}

}  // namespace ISA
}  // namespace aiakq

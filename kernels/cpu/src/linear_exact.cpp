// Products of quantized weights (linear_product.h): floats times integer codes.

#include "linear_product.h"

namespace aiakq {
namespace ISA {

Product exact_product(const Linear& op) {
  return product_of<EXACT>(op);
}

}  // namespace ISA
}  // namespace aiakq

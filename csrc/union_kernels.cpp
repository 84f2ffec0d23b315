#include "union_kernels.h"

namespace thinfer {

#define THINFER_DECLARE(isa)                                                                                      \
  namespace isa {                                                                                                 \
  void find_union(const QuantizedRows&, int, int, bool, const UnionChannels&);                                    \
  size_t union_gemm(const Matrix&, const QuantizedRows&, const UnionChannels&, float*, int, int, int, uint8_t*);  \
  }
THINFER_FOR_EACH_ISA(THINFER_DECLARE)
#undef THINFER_DECLARE

const UnionKernels& union_kernels(Isa isa) {
#define THINFER_TABLE(isa) {isa::find_union, isa::union_gemm},
  static const UnionKernels tables[] = {THINFER_FOR_EACH_ISA(THINFER_TABLE)};
#undef THINFER_TABLE
  return tables[static_cast<int>(isa)];
}

}  // namespace thinfer

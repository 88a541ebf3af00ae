#include "vm.h"
namespace emu {
OpTable tensor_ops() { return {nullptr, 0}; }
OpTable wgmma_ops() { return {nullptr, 0}; }
void retire_wgmmas(Warp&, size_t) {}
void land_bulk(Warp&, int, BulkOp&, bool) {}
void perform_request(Cta& cta, const TensorRequest& t) {
  Warp& w = *cta.warps[t.warp];
  complete_copies(w, t.lane, w.open_copies[t.lane]);
}
}

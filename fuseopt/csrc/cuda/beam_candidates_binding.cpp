#include "binding.h"

namespace fuseopt {
namespace {

constexpr const char* kOp = "beam_candidates";

std::tuple<Tensor, Tensor> beam_candidates(Tensor scores, Tensor running_scores, int64_t count, bool overlap) {
  FUSEOPT_CHECK(scores.dim() == 2 && running_scores.dim() == 2 && scores.size(0) == running_scores.numel(),
                "fuseopt::", kOp, ": scores must be [items * beams, vocabulary], running_scores [items, beams]");
  FUSEOPT_CHECK(scores.scalar_type() == ScalarType::Float && running_scores.scalar_type() == ScalarType::Float,
                "fuseopt::", kOp, ": scores and running_scores must be float32");
  FUSEOPT_CHECK(count > 0 && count <= BeamCandidates::kMaxCount, "fuseopt::", kOp, ": count must be between 1 and ",
                BeamCandidates::kMaxCount, ", not ", count);
  FUSEOPT_CHECK(running_scores.size(1) * scores.size(1) <= INT32_MAX, "fuseopt::", kOp,
                ": the continuations of an item are more than 2^31");
  const Launch launch(kOp, scores);
  const Tensor running = as_contiguous(running_scores);
  BeamCandidates candidates = {};
  candidates.scores = static_cast<const float*>(scores.data_ptr());
  candidates.row_stride = scores.stride(0);
  candidates.column_stride = scores.stride(1);
  candidates.vocabulary = scores.size(1);
  candidates.running_scores = static_cast<const float*>(running.data_ptr());
  candidates.items = running.size(0);
  candidates.beams = running.size(1);
  candidates.count = static_cast<int>(count);
  const int64_t chunks = scores.size(0) * fuseopt_beam_candidates_chunks(scores.size(1));
  const Tensor chunk_keys = allocate(scores, {chunks, count}, ScalarType::Int);
  const Tensor chunk_tokens = allocate(scores, {chunks, count}, ScalarType::Int);
  candidates.chunk_keys = static_cast<unsigned*>(chunk_keys.data_ptr());
  candidates.chunk_tokens = static_cast<int*>(chunk_tokens.data_ptr());
  Tensor values = allocate(scores, {candidates.items, count}, ScalarType::Float);
  Tensor places = allocate(scores, {candidates.items, count}, ScalarType::Long);
  candidates.values = static_cast<float*>(values.data_ptr());
  candidates.places = static_cast<int64_t*>(places.data_ptr());
  candidates.overlap = overlap;
  launch.check(fuseopt_beam_candidates(candidates, launch.stream()));
  return {values, places};
}

}  // namespace
}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt;
  library.impl("beam_candidates", TORCH_BOX(&beam_candidates));
}

#include "cuda/common/pdl.h"

namespace fuseopt::decode_beams_binding {
namespace {

constexpr const char* kOp = "decode_beams_";

template <typename T>
T* data_as(const char* name, const Tensor& tensor) {
  FUSEOPT_CHECK(tensor.is_contiguous(), "fuseopt::", kOp, ": ", name, " must be contiguous");
  return static_cast<T*>(tensor.data_ptr());
}

int64_t* integers(const char* name, const Tensor& tensor) { return data_as<int64_t>(name, tensor); }

float* floats(const char* name, const Tensor& tensor) { return data_as<float>(name, tensor); }

bool* flags(const char* name, const Tensor& tensor) { return data_as<bool>(name, tensor); }

int* counts(const char* name, const Tensor& tensor) { return data_as<int>(name, tensor); }

void decode_beams(Tensor values, Tensor places, Tensor running_scores, Tensor scores, Tensor is_finished,
                  Tensor lengths, Tensor improvable, Tensor ids, Tensor ancestry, Tensor tokens, Tensor going,
                  Tensor length, Tensor generated, Tensor counters, Tensor arrived, Tensor limit, Tensor penalties,
                  std::optional<Tensor> eos, int64_t vocabulary, bool stops_when_full, bool advance, bool pdl) {
  FUSEOPT_CHECK(values.dim() == 2 && running_scores.dim() == 2 && ids.dim() == 3 && ancestry.dim() == 3 &&
                    penalties.dim() == 2,
                "fuseopt::", kOp, ": values and running_scores must have two dimensions, ids and ancestry three");
  const int64_t beams_count = running_scores.size(1), candidates = values.size(1);
  FUSEOPT_CHECK(candidates <= DecodeBeams::kMaxCandidates && candidates >= 2 * beams_count, "fuseopt::", kOp,
                ": there must be at most ", DecodeBeams::kMaxCandidates, " candidates and twice as many as beams, not ",
                candidates, " for ", beams_count);
  FUSEOPT_CHECK(ids.size(1) == running_scores.numel() && ancestry.size(1) == ids.size(1) && arrived.numel() == 2,
                "fuseopt::", kOp, ": ids and ancestry must have a row for each beam, arrived two elements");
  const Launch launch(kOp, values);
  PdlGuard guard(pdl);
  const Tensor read_values = guard.contiguous(values), read_places = guard.contiguous(places);
  DecodeBeams beams = {};
  beams.values = floats("values", read_values);
  beams.places = integers("places", read_places);
  beams.items = running_scores.size(0);
  beams.beams = beams_count;
  beams.candidates = static_cast<int>(candidates);
  beams.vocabulary = vocabulary;
  beams.running_scores = floats("running_scores", running_scores);
  beams.scores = floats("scores", scores);
  beams.is_finished = flags("is_finished", is_finished);
  beams.lengths = integers("lengths", lengths);
  beams.improvable = flags("improvable", improvable);
  beams.ids = integers("ids", ids);
  beams.ids_columns = ids.size(2);
  beams.ancestry = counts("ancestry", ancestry);
  beams.capacity = ancestry.size(2);
  beams.tokens = integers("tokens", tokens);
  FUSEOPT_CHECK(going.numel() > 0, "fuseopt::", kOp, ": going must have an element at least");
  beams.going = flags("going", going);
  beams.going_count = going.numel();
  beams.length = integers("length", length);
  beams.generated = integers("generated", generated);
  beams.counters = integers("counters", counters);
  beams.arrived = counts("arrived", arrived);
  beams.limit = integers("limit", limit);
  beams.penalties = data_as<double>("penalties", penalties);
  beams.best_penalties = beams.penalties + penalties.size(1);
  const auto ends = guard.contiguous(eos);
  beams.eos = ends.has_value() ? integers("eos", *ends) : nullptr;
  beams.eos_count = ends.has_value() ? ends->numel() : 0;
  beams.stops_when_full = stops_when_full;
  beams.advance = advance;
  beams.pdl = guard.allowed();
  launch.check(fuseopt_decode_beams(beams, launch.stream()));
}

constexpr auto kDecodeBeamsInPlace = arguments("decode_beams_", {
    {"values", kOnlyFloat}, {"places", kOnlyLong}, {"running_scores", kOnlyFloat}, {"scores", kOnlyFloat},
    {"is_finished", kOnlyBool}, {"lengths", kOnlyLong}, {"improvable", kOnlyBool}, {"ids", kOnlyLong},
    {"ancestry", kOnlyInt}, {"tokens", kOnlyLong}, {"going", kOnlyBool}, {"length", kOnlyLong},
    {"generated", kOnlyLong}, {"counters", kOnlyLong}, {"arrived", kOnlyInt}, {"limit", kOnlyLong},
    {"penalties", kOnlyDouble}, {"eos", kOnlyLong}});

}  // namespace
}  // namespace fuseopt::decode_beams_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_beams_binding;
  library.impl("decode_beams_", TORCH_BOX((fuseopt::checked<decode_beams, kDecodeBeamsInPlace>)));
}

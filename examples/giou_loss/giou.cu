// Generalised IoU loss of pairs of boxes (x1, y1, x2, y2), a pair a thread: the losses, and with them the gradient for
// the first box of each pair. Boxes are read and written as one vector each, in their own dtype; float32 inside.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "new_tensor.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr float kEps = 1e-7f;
constexpr int kThreads = 128;

template <typename T>
struct alignas(4 * sizeof(T)) Box {
  T x1, y1, x2, y2;
};

// How much of the gradient of max(a, b) is a's: all, none, or half where they are equal.
__device__ float larger(float a, float b) { return a > b ? 1.0f : a == b ? 0.5f : 0.0f; }

template <typename T, bool kWithGradient>
__global__ void giou_kernel(const Box<T>* boxes, const Box<T>* targets, const bool* valid, const T* weight,
                            int64_t weight_stride, T* losses, Box<T>* gradient, int64_t pairs) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pair >= pairs) return;
  const Box<T> a = boxes[pair], b = targets[pair];
  const bool counts = valid[pair];
  const float x1 = a.x1, y1 = a.y1, x2 = a.x2, y2 = a.y2, u1 = b.x1, v1 = b.y1, u2 = b.x2, v2 = b.y2;
  const float width = fminf(x2, u2) - fmaxf(x1, u1), height = fminf(y2, v2) - fmaxf(y1, v1);
  const bool overlaps = width > 0 && height > 0;
  const float inter = overlaps ? width * height : 0.0f;
  const float area_x = y2 - y1, area_y = x2 - x1;
  const float union_ = area_x * area_y + (u2 - u1) * (v2 - v1) - inter;
  const float hull_width = fmaxf(x2, u2) - fminf(x1, u1), hull_height = fmaxf(y2, v2) - fminf(y1, v1);
  const float hull = hull_width * hull_height;
  const float per_union = 1 / (union_ + kEps), per_hull = 1 / (hull + kEps);
  const float loss = 1 - inter * per_union + (hull - union_) * per_hull;
  losses[pair] = T(counts ? loss : 0.0f);
  if constexpr (kWithGradient) {
    const float scale = weight[pair * weight_stride];
    const float by_union = inter * per_union * per_union - per_hull;
    const float by_inter = overlaps ? -per_union - by_union : 0.0f;
    const float by_hull = (union_ + kEps) * per_hull * per_hull;
    const float across = by_hull * hull_height, along = by_hull * hull_width;
    const float gx1 = -by_inter * height * larger(x1, u1) - across * larger(u1, x1) - by_union * area_x;
    const float gy1 = -by_inter * width * larger(y1, v1) - along * larger(v1, y1) - by_union * area_y;
    const float gx2 = by_inter * height * larger(u2, x2) + across * larger(x2, u2) + by_union * area_x;
    const float gy2 = by_inter * width * larger(v2, y2) + along * larger(y2, v2) + by_union * area_y;
    gradient[pair] = counts ? Box<T>{T(gx1 * scale), T(gy1 * scale), T(gx2 * scale), T(gy2 * scale)}
                            : Box<T>{T(0.0f), T(0.0f), T(0.0f), T(0.0f)};
  }
}

template <typename T, bool kWithGradient>
void launch(const Tensor& boxes, const Tensor& targets, const Tensor& valid, const Tensor& weight, Tensor& losses,
            Tensor& gradient) {
  const int64_t pairs = valid.numel();
  if (pairs == 0) return;
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(boxes.get_device_index(), &stream);
  giou_kernel<T, kWithGradient><<<(pairs + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const Box<T>*>(boxes.const_data_ptr()), static_cast<const Box<T>*>(targets.const_data_ptr()),
      static_cast<const bool*>(valid.const_data_ptr()), static_cast<const T*>(weight.const_data_ptr()),
      weight.dim() == 0 ? 0 : 1, static_cast<T*>(losses.mutable_data_ptr()),
      static_cast<Box<T>*>(gradient.mutable_data_ptr()), pairs);
}

template <bool kWithGradient>
void dispatch(const Tensor& boxes, const Tensor& targets, const Tensor& valid, const Tensor& weight, Tensor& losses,
              Tensor& gradient) {
  const auto run = boxes.scalar_type() == ScalarType::Float      ? launch<float, kWithGradient>
                   : boxes.scalar_type() == ScalarType::Half     ? launch<__half, kWithGradient>
                                                                 : launch<__nv_bfloat16, kWithGradient>;
  run(boxes, targets, valid, weight, losses, gradient);
}

Tensor empty_losses(const Tensor& boxes, const Tensor& valid) {
  return fuseopt::new_tensor(boxes, valid.sizes());
}

}  // namespace

Tensor loss(Tensor boxes, Tensor targets, Tensor valid) {
  Tensor losses = empty_losses(boxes, valid);
  dispatch<false>(boxes, targets, valid, boxes, losses, losses);
  return losses;
}

std::tuple<Tensor, Tensor> loss_and_gradient(Tensor boxes, Tensor targets, Tensor valid, Tensor weight) {
  Tensor losses = empty_losses(boxes, valid), gradient = fuseopt::new_tensor_like(boxes);
  dispatch<true>(boxes, targets, valid, weight, losses, gradient);
  return {losses, gradient};
}

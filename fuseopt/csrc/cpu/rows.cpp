#include "check.h"
#include "cpu/rows.h"
#include "new_tensor.h"


namespace fuseopt {

DType to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Double: return kFloat64;
    default: break;
  }
  FUSEOPT_CHECK(false, "fuseopt: expected float32, float16, bfloat16 or float64, got ", type);
}

Tensor empty(const int64_t* sizes, int64_t dim, ScalarType type) {
  const auto type_number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  return new_tensor({sizes, static_cast<size_t>(dim)}, type_number, aoti_torch_device_type_cpu(), 0);
}

Rows Rows::single(const Tensor& tensor) {
  Rows rows(tensor, fuseopt::dtype(tensor));
  rows.n_cols_ = tensor.numel();
  return rows;
}

Rows::Rows(const Tensor& tensor, IntHeaderOnlyArrayRef sizes) : Rows(tensor, fuseopt::dtype(tensor)) {
  const IntHeaderOnlyArrayRef own_sizes = tensor.sizes();
  const IntHeaderOnlyArrayRef own_strides = tensor.strides();
  const int64_t dim = sizes.size();
  const int64_t missing = dim - static_cast<int64_t>(own_sizes.size());
  FUSEOPT_CHECK(missing >= 0, "fuseopt: a tensor of ", own_sizes.size(), " dimensions does not broadcast to ", dim);
  std::vector<Dim> dims;
  for (int64_t d = dim - 1; d >= 0; --d) {
    const int64_t own = d < missing ? 1 : own_sizes[d - missing];
    FUSEOPT_CHECK(own == sizes[d] || own == 1, "fuseopt: size ", own, " does not broadcast to ", sizes[d],
                  " in dimension ", d);
    const int64_t stride = own == 1 ? 0 : own_strides[d - missing];
    if (d == dim - 1) {
      n_cols_ = sizes[d];
      col_stride_ = sizes[d] == 1 ? 1 : stride;
      continue;
    }
    n_rows_ *= sizes[d];
    if (sizes[d] == 1) continue;
    if (!dims.empty() && stride == dims.back().stride * dims.back().size) {
      dims.back().size *= sizes[d];
    } else {
      dims.push_back({sizes[d], stride});
    }
  }
  if (!dims.empty()) {
    outer_stride_ = dims.back().stride;
    dims.pop_back();
  }
  dims_ = std::move(dims);
}

void check_same_shape(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  const auto own = tensor.sizes(), wanted = other.sizes();
  FUSEOPT_CHECK(std::equal(own.begin(), own.end(), wanted.begin(), wanted.end()), "fuseopt: ", name,
                " has not the shape of ", other_name);
}

template <typename Math>
std::vector<Math> flatten(const Tensor& tensor, int64_t n, const char* name) {
  FUSEOPT_CHECK(tensor.numel() == n, "fuseopt: ", name, " has ", tensor.numel(), " elements, expected ", n);
  const Rows rows(tensor);
  std::vector<Math> values(n);
  for (int64_t row = 0; row < rows.n_rows(); ++row) {
    Math* dst = values.data() + row * rows.n_cols();
    const Math* src = rows.read(row, dst);
    if (src != dst) std::copy_n(src, rows.n_cols(), dst);
  }
  return values;
}

template <typename Math>
std::vector<Math> flatten_parameter(const Tensor& tensor, int64_t n, const char* name) {
  FUSEOPT_CHECK(tensor.dim() == 1, "fuseopt: ", name, " has ", tensor.dim(), " dimensions, expected one");
  return flatten<Math>(tensor, n, name);
}

template std::vector<float> flatten(const Tensor&, int64_t, const char*);
template std::vector<double> flatten(const Tensor&, int64_t, const char*);
template std::vector<float> flatten_parameter(const Tensor&, int64_t, const char*);
template std::vector<double> flatten_parameter(const Tensor&, int64_t, const char*);

}  // namespace fuseopt

#include "aotkit_runner.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <memory>

#include "errors.h"
#include "package.h"

struct aotkit_package {
  aotkit::Package package;
};

namespace {

thread_local std::string last_error;

// Runs, and turns whatever is thrown into a status.
template <typename Run>
aotkit_status guarded(Run run) {
  try {
    run();
    return AOTKIT_OK;
  } catch (const aotkit::Error &error) {
    last_error = error.what();
    return error.status;
  } catch (const c10::Error &error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception &error) {
    last_error = error.what();
  } catch (...) {
    last_error = "something was thrown that is no exception";
  }
  return AOTKIT_FAILED;
}

aotkit::Value from_c(const aotkit_value &given) {
  if (given.kind == AOTKIT_INTEGER) return given.integer;
  const aotkit_tensor &tensor = given.tensor;
  const bool known = tensor.dtype >= 0 && tensor.dtype < static_cast<int32_t>(at::ScalarType::NumOptions);
  if (given.kind != AOTKIT_TENSOR || tensor.dim < 0 || !known || (tensor.dim && (!tensor.sizes || !tensor.strides)))
    throw aotkit::Error(AOTKIT_BAD_ARGUMENT, "an argument is neither a tensor nor an integer, or is not filled in");
  const auto dim = static_cast<size_t>(tensor.dim);
  const at::IntArrayRef sizes(tensor.sizes, dim), strides(tensor.strides, dim);
  for (size_t k = 0; k < dim; ++k)
    if (sizes[k] < 0 || strides[k] < 0) throw aotkit::Error(AOTKIT_BAD_ARGUMENT, "an argument has a negative size or stride");
  if (tensor.data == nullptr && std::find(sizes.begin(), sizes.end(), 0) == sizes.end())
    throw aotkit::Error(AOTKIT_BAD_ARGUMENT, "an argument with elements has no memory");
  return at::from_blob(tensor.data, sizes, strides, at::TensorOptions(static_cast<at::ScalarType>(tensor.dtype)));
}

void to_c(const aotkit::Value &value, bool constant, aotkit_value &result) {
  result = {};
  result.kind = constant ? AOTKIT_CONSTANT : AOTKIT_NOTHING;
  if (value.isInt()) {
    result.kind = AOTKIT_INTEGER;
    result.integer = value.toInt();
  } else if (value.isTensor() && value.toTensor().defined()) {
    auto owner = std::make_unique<at::Tensor>(value.toTensor());
    result.kind = AOTKIT_TENSOR;
    result.tensor = {owner->data_ptr(), static_cast<int32_t>(owner->scalar_type()), static_cast<int32_t>(owner->dim()),
                     owner->sizes().data(), owner->strides().data()};
    result.owner = owner.release();
  }
}

}  // namespace

aotkit_status aotkit_load(const char *path, const char *signing_key, aotkit_package **package) {
  *package = nullptr;
  return guarded([&] { *package = new aotkit_package{aotkit::Package(path, signing_key)}; });
}

void aotkit_unload(aotkit_package *package) { delete package; }

size_t aotkit_num_inputs(const aotkit_package *package) { return package->package.num_inputs(); }

size_t aotkit_num_outputs(const aotkit_package *package) { return package->package.outputs().size(); }

const char *aotkit_description(const aotkit_package *package) { return package->package.description().c_str(); }

const char *aotkit_output_name(const aotkit_package *package, size_t position) {
  const auto &outputs = package->package.outputs();
  return position < outputs.size() ? outputs[position].name.c_str() : nullptr;
}

aotkit_status aotkit_run(aotkit_package *package, const aotkit_value *inputs, size_t num_inputs, aotkit_value *outputs,
                         size_t num_outputs) {
  for (size_t k = 0; k < num_outputs; ++k) outputs[k] = {};
  return guarded([&] {
    const auto &declared = package->package.outputs();
    if (num_outputs != declared.size())
      throw aotkit::Error(AOTKIT_BAD_ARGUMENT, "the package has " + std::to_string(declared.size()) + " results");
    std::vector<aotkit::Value> given;
    for (size_t k = 0; k < num_inputs; ++k) given.push_back(from_c(inputs[k]));
    const std::vector<aotkit::Value> results = package->package.run(std::move(given));
    for (size_t k = 0; k < num_outputs; ++k) to_c(results[k], declared[k].constant, outputs[k]);
  });
}

void aotkit_release(aotkit_value *value) {
  delete static_cast<at::Tensor *>(value->owner);
  *value = {};
}

const char *aotkit_last_error(void) { return last_error.c_str(); }

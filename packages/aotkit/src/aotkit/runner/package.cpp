#include "package.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstring>

#include "errors.h"
#include "processor.h"

namespace aotkit {
namespace {

constexpr int64_t ARTIFACT_FORMAT = 10, PLAN_FORMAT = 5, MANIFEST_FORMAT = 3;

[[noreturn]] void wrong_call(const std::string &message) { throw Error(AOTKIT_BAD_ARGUMENT, message); }


// Why what was made there can't run here, or nothing.
std::string unfit(const Json &made) {
  const std::string &version = made.at("torch").text();
  const std::string release = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  if (version.rfind(release, 0) != 0) return "it was compiled with torch " + version + ", and this is torch " + release + "x";
  utsname here{};
  uname(&here);
  const std::string system = std::string(here.sysname) + " " + here.machine;
  if (made.at("system").text() != system) return "it was compiled for " + made.at("system").text() + "; this is " + system;
  if (made.at("device").text() != "cpu") return "it was compiled for the device " + made.at("device").text();
  std::vector<std::string> features;
  for (const Json &feature : made.at("features").list()) features.push_back(feature.text());
  const std::string missing = missing_feature(features);
  return missing.empty() ? "" : "it was compiled for a processor with " + missing + ", which this one lacks";
}

void list_outputs(const Json &described, const std::string &name, std::vector<Package::Output> &outputs) {
  if (described.members.size() != 1) bad_file("the results of the package are damaged");
  const auto &[kind, body] = described.members[0];
  const std::string before = name.empty() ? "" : name + ".";
  if (kind == "leaf") {
    outputs.push_back({name, false, static_cast<size_t>(body.whole())});
  } else if (kind == "constant") {
    outputs.push_back({name, true, 0});
  } else if (kind == "dict" || kind == "record") {
    for (const Json &pair : (kind == "dict" ? body : body.at("fields")).list()) {
      const Json &key = pair.at(size_t(0));
      list_outputs(pair.at(1), before + (key.is(Json::Int) ? std::to_string(key.integer) : key.text()), outputs);
    }
  } else if (kind == "tuple" || kind == "list") {
    for (size_t k = 0; k < body.list().size(); ++k) list_outputs(body.items[k], before + std::to_string(k), outputs);
  } else {
    unsupported("the package returns a " + kind);
  }
}

std::pair<const char *, const char *> memory_of(const at::Tensor &tensor) {
  int64_t count = tensor.numel() > 0;
  for (int64_t dim = 0; dim < tensor.dim() && count; ++dim) count += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto begin = static_cast<const char *>(tensor.storage().data()) + tensor.storage_offset() * tensor.element_size();
  return {begin, begin + count * static_cast<int64_t>(tensor.element_size())};
}

bool overlap(const at::Tensor &one, const at::Tensor &other) {  // or lie within each other's gaps
  const auto [begin, end] = memory_of(one);
  const auto [first, last] = memory_of(other);
  return begin < last && first < end;
}

bool overlaps_itself(at::IntArrayRef sizes, const std::vector<int64_t> &strides) {  // as package_weights.py has it
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (size_t dim = 0; dim < strides.size(); ++dim) {
    if (sizes[dim] == 0) return false;
    if (sizes[dim] > 1) steps.emplace_back(strides[dim], sizes[dim]);
  }
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (const auto &[stride, size] : steps) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

size_t numbered(const std::string &name, const char *prefix) {
  if (name.rfind(prefix, 0) != 0) unsupported("the package passes on the value " + name);
  return static_cast<size_t>(std::strtoull(name.c_str() + std::strlen(prefix), nullptr, 10));
}

}  // namespace

Package::Package(const std::string &path, const char *signing_key) : archive_(path) {
  if (signing_key != nullptr) archive_.check_signature(signing_key);
  description_ = std::string(archive_.read("manifest.json"));
  const Json manifest = Json::parse(description_);
  if (manifest.find("stage") != nullptr) bad_file(path + " is a stage of a compile and no package");
  const Json *format = manifest.find("format");
  if (format == nullptr || !format->is(Json::Int) || format->integer != MANIFEST_FORMAT)
    unsupported("the package was written by another version of aotkit; compile it again");
  for (const Json &row : manifest.at("arguments").list()) {
    Argument argument;
    argument.name = row.at("name").text();
    argument.integer = !row.at("symbol").is(Json::Null);
    if (argument.integer) {
      argument.symbol = row.at("symbol");
    } else {
      argument.dtype = dtype_named(row.at("dtype").text());
      argument.shape = row.at("shape").list();
      argument.stride = row.at("stride").list();
      argument.written = row.at("written").truth();
      if (argument.shape.size() != argument.stride.size()) bad_file("the argument " + argument.name + " is damaged");
    }
    arguments_.push_back(std::move(argument));
  }
  ranges_ = manifest.at("ranges");
  list_outputs(manifest.at("outputs"), "", outputs_);
  read_weights(manifest);
  choose_variant(manifest);
  read_plan(Json::parse(archive_.read(folder_ + "/plan")));
}

void Package::choose_variant(const Json &manifest) {
  const Json *chosen = nullptr;
  std::string reasons;
  for (const Json &variant : manifest.at("variants").list()) {
    const Json &made = variant.at("environment");
    if (made.at("artifact").whole() != ARTIFACT_FORMAT) unsupported("the package has another format; compile it again");
    const std::string reason = unfit(made);
    if (reason.empty()) {
      chosen = &variant;
      break;
    }
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  if (chosen == nullptr) throw Error(AOTKIT_WRONG_PLACE, "the package can't run here: " + reasons);
  folder_ = chosen->at("folder").text();
  const Json &artifact = chosen->at("artifact");
  guards_ = artifact.at("guards");
  const Json &forward = artifact.at("forward");
  if (forward.find("recorded") != nullptr) unsupported("the package records CUDA graphs");
  if (!forward.at("collectives").list().empty()) unsupported("the package talks to other ranks");
  const Json &operators = manifest.at("operators");
  if (!operators.list().empty())
    unsupported("the package calls the custom operator " + operators.at(size_t(0)).at("name").text());
  auto constants = read_constants(forward, "forward");
  for (const auto &[name, index] : forward.at("borrowed").members) {  // weights that are constants as they are
    if (index.whole() < 0 || static_cast<size_t>(index.integer) >= leading_.size()) bad_file("a constant is missing");
    constants[name] = leading_[static_cast<size_t>(index.integer)];
  }
  program_ = std::make_unique<Program>(Json::parse(archive_.read(folder_ + "/forward")), std::move(constants));
}

std::unordered_map<std::string, at::Tensor> Package::read_constants(const Json &described, const std::string &name) const {
  std::unordered_map<std::string, at::Tensor> constants;
  const std::vector<Json> &rows = described.at("constants").list();
  for (size_t k = 0; k < rows.size(); ++k) {
    const std::string_view data = archive_.read(folder_ + "/" + name + ".constant" + std::to_string(k));
    if (rows[k].at(4).text() != "cpu") unsupported("the package has constants on " + rows[k].at(4).text());
    const at::ScalarType dtype = dtype_named(rows[k].at(1).text());
    std::vector<int64_t> sizes, strides;
    for (const Json &size : rows[k].at(2).list()) sizes.push_back(size.whole());
    for (const Json &stride : rows[k].at(3).list()) strides.push_back(stride.whole());
    const at::Tensor value = at::empty_strided(sizes, strides, dtype);
    const at::Tensor flat = at::empty({static_cast<int64_t>(data.size())}, at::kByte);
    std::memcpy(flat.data_ptr(), data.data(), data.size());
    if (static_cast<int64_t>(data.size()) != value.numel() * static_cast<int64_t>(value.element_size()))
      bad_file("a constant of the package has another size");
    if (value.numel()) value.copy_(flat.view(dtype).view(sizes));
    constants[rows[k].at(size_t(0)).text()] = value;
  }
  return constants;
}

void Package::read_weights(const Json &manifest) {
  static const std::unordered_map<std::string, at::ScalarType> names = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}, {"I64", at::kLong},
      {"I32", at::kInt}, {"I16", at::kShort}, {"I8", at::kChar}, {"U8", at::kByte}, {"BOOL", at::kBool},
      {"C64", at::kComplexFloat}};
  const std::string_view file = archive_.read("weights.safetensors");
  uint64_t length = 0;
  if (file.size() < 8) bad_file("the weights are cut short");
  std::memcpy(&length, file.data(), 8);
  if (length > file.size() - 8) bad_file("the weights are cut short");
  const Json header = Json::parse(file.substr(8, length));
  const std::string_view data = file.substr(8 + length);
  std::unordered_map<std::string, at::Tensor> found;
  for (const auto &[name, described] : header.members) {
    if (name.rfind(".gap", 0) == 0 || name == "__metadata__") continue;
    const auto dtype = names.find(described.at("dtype").text());
    if (dtype == names.end()) unsupported("the weight " + name + " is of " + described.at("dtype").text());
    std::vector<int64_t> sizes;
    int64_t count = 1;
    for (const Json &size : described.at("shape").list()) {
      sizes.push_back(size.whole());
      if (size.integer < 0 || __builtin_mul_overflow(count, size.integer, &count)) bad_file("the weight " + name + " is damaged");
    }
    const int64_t begin = described.at("data_offsets").at(size_t(0)).whole();
    const int64_t end = described.at("data_offsets").at(1).whole();
    const auto nbytes = static_cast<int64_t>(c10::elementSize(dtype->second));
    if (begin < 0 || end < begin || static_cast<uint64_t>(end) > data.size() || count != (end - begin) / nbytes)
      bad_file("the file is cut short or damaged at the weight " + name);
    char *place = archive_.writable(data.substr(static_cast<size_t>(begin)));
    found[name] = at::from_blob(place, sizes, at::TensorOptions(dtype->second));
  }
  if (const Json *devices = manifest.find("devices"); devices != nullptr && !devices->members.empty())
    unsupported("the package has weights on " + devices->members[0].second.text());
  for (const auto &[name, strides] : manifest.at("strides").members) {
    std::vector<int64_t> wanted;
    for (const Json &stride : strides.list()) wanted.push_back(stride.whole());
    const auto kept = found.find(name);
    if (kept == found.end() || wanted.size() != static_cast<size_t>(kept->second.dim())) bad_file("the weight " + name + " is damaged");
    kept->second = at::empty_strided(kept->second.sizes(), wanted, kept->second.scalar_type()).copy_(kept->second);
  }
  for (const auto &[name, view] : manifest.at("views").members) {  // weights over one memory
    const auto memory = found.find(view.at(size_t(0)).text());
    if (memory == found.end()) bad_file("the memory of the weight " + name + " is missing");
    std::vector<int64_t> sizes, wanted;
    for (const Json &size : view.at(2).list()) sizes.push_back(size.whole());
    for (const Json &stride : view.at(3).list()) wanted.push_back(stride.whole());
    found[name] = memory->second.view(dtype_named(view.at(1).text())).as_strided(sizes, wanted, view.at(4).whole());
  }
  for (const auto &[name, first] : manifest.at("same").members) {
    const auto other = found.find(first.text());
    if (other == found.end()) bad_file("the weight " + first.string + " is missing");
    found[name] = at::Tensor(other->second);
  }
  const at::Tensor nothing = at::empty({0});
  for (const Json &name : manifest.at("gone").list()) found[name.text()] = nothing;
  for (const Json &name : manifest.at("weights").list()) {
    const auto weight = found.find(name.text());
    if (weight == found.end()) bad_file("the weight " + name.string + " is missing");
    leading_.push_back(weight->second);
  }
}

void Package::read_plan(const Json &plan) {
  if (plan.at("version").whole() != PLAN_FORMAT) unsupported("the package's wrapper plan has another format; compile it again");
  const Json &record = plan.at("record");
  const Json &call = record.at("call");
  const size_t count = leading_.size() + arguments_.size();
  if (static_cast<size_t>(record.at("num_inputs").whole()) != count) bad_file("the package has another number of arguments");
  static const char *refused[] = {"training", "subclasses", "random", "lazy_inputs", "fakes", "backward_mutated_inputs"};
  for (const char *name : refused)
    if (const Json *found = call.find(name); found != nullptr && !(found->is(Json::Bool) && !found->flag))
      unsupported(std::string("the package's call has ") + name);
  for (const Json &name : call.at("graph_inputs").list()) graph_inputs_.push_back(numbered(name.text(), "in"));
  const auto results = static_cast<size_t>(call.at("num_forward_outputs").whole());
  const auto check = [](size_t position, size_t limit) {
    if (position >= limit) bad_file("the package's wrapper plan is damaged");
  };
  for (size_t position : graph_inputs_) check(position, count);
  if (graph_inputs_.size() != program_->num_inputs()) bad_file("the compiled graph takes another number of arguments");
  for (const Json &operation : record.at("prologue").list()) {
    const std::string &kind = operation.at("record").text();
    if (kind == "CheckDuplicate") {
      duplicates_.emplace_back(numbered(operation.at("value").text(), "in"), numbered(operation.at("first").text(), "in"));
      check(duplicates_.back().first, count);
      check(duplicates_.back().second, count);
    } else if (kind == "CheckAliases") {
      std::vector<size_t> mutated, others;
      for (const Json &name : operation.at("mutated").list()) mutated.push_back(numbered(name.text(), "in"));
      for (const Json &name : operation.at("others").list()) others.push_back(numbered(name.text(), "in"));
      for (size_t k = 0; k < mutated.size(); ++k) {
        for (size_t other : others) apart_.emplace_back(mutated[k], other);
        for (size_t j = 0; j < k; ++j) apart_.emplace_back(mutated[k], mutated[j]);
      }
      for (const auto &[one, other] : apart_) check(std::max(one, other), count);
    } else if (kind != "BindSymbol" && kind != "ReadVersion") {  // symbols are read by the graph itself
      unsupported("the package needs " + kind + " before its call");
    }
  }
  for (const Json &operation : record.at("epilogue").list()) {
    const std::string &kind = operation.at("record").text();
    if (kind == "CopyBack") {
      copies_.push_back({numbered(operation.at("value").text(), "in"), numbered(operation.at("source").text(), "fw")});
      check(copies_.back().input, count);
      check(copies_.back().result, results);
    } else if (kind != "SetVersion" && kind != "BumpVersion" && kind != "BumpVersions" && kind != "MarkDynamic") {
      // The rest is for autograd, and for Dynamo.
      unsupported("the package needs " + kind + " after its call");
    }
  }
  for (const Json &value : record.at("returns").list()) {
    const Json *name = value.find("value");
    if (name == nullptr) {
      returns_.push_back(results + count);  // a constant; its place among the outputs has its value
    } else if (name->text().rfind("in", 0) == 0) {
      returns_.push_back(results + numbered(name->string, "in"));
      check(returns_.back() - results, count);
    } else {
      returns_.push_back(numbered(name->string, "fw"));
      check(returns_.back(), results);
    }
  }
  for (const Output &output : outputs_)
    if (!output.constant) check(output.position, returns_.size());
}

void Package::check_sizes(const std::vector<Value> &inputs, const Symbols &symbols) const {
  for (const auto &[name, bounds] : ranges_.members) {
    const auto found = symbols.find(name);
    if (found == symbols.end()) continue;
    const Json &high = bounds.at(1);
    if (found->second < bounds.at(size_t(0)).whole() || (high.is(Json::Int) && found->second > high.integer)) {
      const std::string most = high.is(Json::Int) ? " to " + std::to_string(high.integer) : " or more";
      wrong_call("a size is " + std::to_string(found->second) + "; the package was compiled for " +
                 std::to_string(bounds.at(size_t(0)).integer) + most);
    }
  }
  for (size_t k = 0; k < arguments_.size(); ++k) {
    if (arguments_[k].integer) {  // a symbol, or what the compile found it to be
      const int64_t number = inputs[k].toInt(), wanted = integer_size(arguments_[k].symbol, symbols);
      if (number != wanted)
        wrong_call(arguments_[k].name + " is " + std::to_string(number) + ", where the package was compiled for " +
                   std::to_string(wanted));
    }
    for (size_t dim = 0; dim < arguments_[k].shape.size(); ++dim) {
      const int64_t size = inputs[k].toTensor().size(static_cast<int64_t>(dim));
      const int64_t wanted = integer_size(arguments_[k].shape[dim], symbols);
      if (size != wanted)
        wrong_call(arguments_[k].name + " has size " + std::to_string(size) + " in dimension " + std::to_string(dim) +
                   ", where the package was compiled for " + std::to_string(wanted));
    }
  }
  for (const Json &guard : guards_.list())
    if (!holds(guard, symbols)) wrong_call("the package was compiled for sizes in another relation to each other");
}

at::Tensor Package::laid_out(const Argument &argument, const at::Tensor &value, const Symbols &symbols) const {
  std::vector<int64_t> strides;
  bool differs = value.is_conj() || value.is_neg();
  for (size_t dim = 0; dim < argument.stride.size(); ++dim) {
    strides.push_back(integer_size(argument.stride[dim], symbols));
    differs = differs || (value.size(static_cast<int64_t>(dim)) > 1 && value.stride(static_cast<int64_t>(dim)) != strides[dim]);
  }
  if (!differs) return value;
  if (overlaps_itself(value.sizes(), strides))
    wrong_call(argument.name + " has other strides than the package was compiled for, by which elements are one number");
  if (argument.written) wrong_call(argument.name + " is written to and has other strides than the package was compiled for");
  return at::empty_strided(value.sizes(), strides, value.scalar_type()).copy_(value);
}

std::vector<Value> Package::run(std::vector<Value> inputs) {
  const at::NoGradGuard no_grad;
  if (inputs.size() != arguments_.size())
    wrong_call("the package takes " + std::to_string(arguments_.size()) + " arguments, not " + std::to_string(inputs.size()));
  Symbols symbols;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Argument &argument = arguments_[k];
    if (argument.integer) {
      if (!inputs[k].isInt()) wrong_call(argument.name + " has to be an integer");
      if (argument.symbol.is(Json::String)) symbols.emplace(argument.symbol.string, inputs[k].toInt());
      continue;
    }
    if (!inputs[k].isTensor()) wrong_call(argument.name + " has to be a tensor");
    const at::Tensor &value = inputs[k].toTensor();
    if (value.scalar_type() != argument.dtype)
      wrong_call(argument.name + " is of " + c10::toString(value.scalar_type()) + "; the package was compiled for " +
                 c10::toString(argument.dtype));
    if (static_cast<size_t>(value.dim()) != argument.shape.size())
      wrong_call(argument.name + " has " + std::to_string(value.dim()) + " dimensions; the package was compiled for " +
                 std::to_string(argument.shape.size()));
    for (size_t dim = 0; dim < argument.shape.size(); ++dim)
      if (argument.shape[dim].is(Json::String)) symbols.emplace(argument.shape[dim].string, value.size(static_cast<int64_t>(dim)));
  }
  for (size_t k = 0; k < inputs.size(); ++k)  // strides that no size tells
    for (size_t dim = 0; dim < arguments_[k].stride.size(); ++dim)
      if (arguments_[k].stride[dim].is(Json::String))
        symbols.emplace(arguments_[k].stride[dim].string, inputs[k].toTensor().stride(static_cast<int64_t>(dim)));
  check_sizes(inputs, symbols);
  std::vector<Value> values(leading_.begin(), leading_.end());
  for (size_t k = 0; k < inputs.size(); ++k)
    values.push_back(arguments_[k].integer ? inputs[k] : Value(laid_out(arguments_[k], inputs[k].toTensor(), symbols)));
  for (const auto &[one, other] : duplicates_)
    if (!values[one].isTensor() || !values[other].isTensor() ||
        !values[one].toTensor().is_same(values[other].toTensor()))
      wrong_call("two arguments were one tensor when the package was compiled, and are two");
  for (const auto &[one, other] : apart_)
    if (values[one].isTensor() && values[other].isTensor() && overlap(values[one].toTensor(), values[other].toTensor()))
      wrong_call("an argument that is written to shares memory with another, which it did not when the package was compiled");
  std::vector<Value> given;
  for (size_t position : graph_inputs_) given.push_back(values[position]);
  std::vector<Value> results = program_->run(given);
  for (const CopyBack &copy : copies_) values[copy.input].toTensor().copy_(results.at(copy.result).toTensor());
  std::vector<Value> outputs;
  for (const Output &output : outputs_) {
    if (output.constant) {
      outputs.emplace_back();
      continue;
    }
    const size_t place = returns_[output.position];
    if (place < results.size()) outputs.push_back(results[place]);
    else if (place - results.size() < values.size()) outputs.push_back(values[place - results.size()]);
    else outputs.emplace_back();
  }
  return outputs;
}

}  // namespace aotkit

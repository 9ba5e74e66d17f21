#include "program.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/Parallel.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "errors.h"
#include "sha256.h"

namespace aotkit {
namespace {

constexpr int64_t FORMAT = 7;  // of launch plans
constexpr int64_t ALIGNMENT = 64, LARGE = 8 << 20, HUGE_PAGE = 1 << 21;
constexpr size_t KEPT_FRAMES = 64;

void wish_huge_pages(const at::Tensor &tensor) {  // Note [Fresh memory in huge pages] of inductor-lower
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  if (bytes < LARGE) return;
  const auto begin = reinterpret_cast<int64_t>(tensor.storage().data());
  const int64_t first = (begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  if (begin + bytes > first)
    madvise(reinterpret_cast<void *>(first), static_cast<size_t>((begin + bytes - first) / HUGE_PAGE * HUGE_PAGE),
            MADV_HUGEPAGE);
}

void allow_tiles() {  // the registers are large, so Linux has each process ask for them
  bool allowed = false;
#ifdef SYS_arch_prctl
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
  if (!allowed)
    throw Error(AOTKIT_WRONG_PLACE, "the package's code uses AMX, and this process may not");
}

int64_t address_of(const at::Tensor &tensor) {  // also of an empty one
  const auto begin = reinterpret_cast<int64_t>(tensor.storage().data());
  return begin + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

at::ScalarType dtype_named(const std::string &given) {
  static const std::unordered_map<std::string, at::ScalarType> known = {
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"int64", at::kLong}, {"int32", at::kInt}, {"int16", at::kShort}, {"int8", at::kChar}, {"uint8", at::kByte},
      {"bool", at::kBool}, {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble}};
  const auto found = known.find(given.rfind("torch.", 0) == 0 ? given.substr(6) : given);
  if (found == known.end()) unsupported("the package holds tensors of " + given);
  return found->second;
}

std::string from_base64(const std::string &text) {
  static const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    if (c == '=') break;
    const size_t digit = digits.find(c);
    if (digit == std::string::npos) bad_file("the package's object code is damaged");
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if ((count += 6) >= 8) bytes += static_cast<char>(bits >> (count -= 8));
  }
  return bytes;
}

struct Program::Call {
  const Values &values;
  Frame &frame;
  std::vector<at::Tensor> tensors;
  std::vector<Value> results;
  int threads;
};

Program::Program(const Json &json, std::unordered_map<std::string, at::Tensor> constants)
    : constants_(std::move(constants)), owner_(static_cast<int>(getpid())) {
  if (json.at("format").is(Json::String)) unsupported("the package holds a graph that is compiled in parts; load it with Python");
  if (json.at("format").whole() != FORMAT) unsupported("the package's launch plan has another format; compile it again");
  if (json.at("target").text() != "cpu") unsupported("the package's kernels are for " + json.at("target").text());
  const Json &facts = json.at("facts");
  std::string code, all;
  for (const Json &section : json.at("sections").list()) all += code = from_base64(section.at(1).text());
  if (in_hex(sha256(all)) != json.at("digest").text()) bad_file("the package's object code is damaged: its digest differs");
  for (const Json &kernel : json.at("kernels").list()) lines_[kernel.at(size_t(0)).text()] = kernel.at(5).text();
  const Json &plan = json.at("plan");
  name_ = plan.at("name").text();
  bool calls = false;
  for (const Json &step : plan.at("steps").list()) calls = calls || step.at(size_t(0)).text() == "segment";
  if (calls) {
    if (const Json *tiles = facts.find("tiles"); tiles != nullptr && tiles->truth()) allow_tiles();
    std::vector<std::string> imports;
    for (const Json &name : facts.at("imports").list()) imports.push_back(name.text());
    object_ = std::make_unique<Object>(code, imports);
  }
  read_buffers(plan);
  read_steps(plan);
}

Program::~Program() = default;

size_t Program::buffer_named(const std::string &name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) bad_file("the launch plan has no buffer " + name);
  return found->second;
}

void Program::read_buffers(const Json &plan) {
  for (const Json &symbol : plan.at("symbols").list()) {
    static const std::unordered_map<std::string, Source::Kind> kinds = {
        {"int", Source::Integer}, {"size", Source::Size}, {"stride", Source::Stride}, {"above", Source::Above},
        {"below", Source::Below}};
    const auto kind = kinds.find(symbol.at(2).text());
    if (kind == kinds.end()) unsupported("a size is read as " + symbol.at(2).text());
    symbols_[symbol.at(size_t(0)).text()] = sources_.size();
    sources_.push_back({kind->second, static_cast<size_t>(symbol.at(1).whole()), symbol.at(3).whole()});
  }
  for (const Json &size : plan.at("computed").list()) {
    const std::string &name = size.at(size_t(0)).text();
    symbols_[name] = sources_.size() + computed_.size();
    computed_.emplace_back(name, size.at(1));
  }
  wide_ = read_exprs(plan.at("wide"), symbols_);
  for (const Json &row : plan.at("buffers").list()) {
    const std::string &name = row.at(size_t(0)).text();
    if (row.at(5).text() != "cpu") unsupported("the package has tensors on " + row.at(5).text());
    by_name_[name] = buffers_.size();
    buffers_.push_back({name, dtype_named(row.at(1).text()), read_exprs(row.at(2), symbols_),
                        read_exprs(row.at(3), symbols_), row.at(4).text()});
    const Buffer &buffer = buffers_.back();
    if (buffer.sizes.size() != buffer.strides.size()) bad_file("the sizes of the buffer " + name + " are damaged");
    if (buffer.storage == "constant" && !constants_.count(name)) bad_file("the constant " + name + " is missing");
  }
  for (const Json &input : plan.at("inputs").list()) {
    const std::string &name = input.text();
    inputs_.push_back(name);
    input_buffers_.push_back(name.rfind('$', 0) == 0 ? -1 : static_cast<int>(buffer_named(name)));
  }
  for (const Source &source : sources_) {
    if (source.input >= inputs_.size()) bad_file("a size is read from an argument that is not there");
    const int buffer = input_buffers_[source.input];
    const bool reads = source.kind == Source::Size || source.kind == Source::Stride;
    if (reads != (buffer >= 0)) bad_file("a size is read from an argument of another kind");
    if (reads && (source.dim < 0 || static_cast<size_t>(source.dim) >= buffers_[static_cast<size_t>(buffer)].sizes.size()))
      bad_file("a size is read from a dimension that is not there");
  }
  for (const Json &slot : plan.at("slots").list()) {
    slots_.push_back(slot.text());
    if (slot.string.rfind('$', 0) != 0) buffers_[buffer_named(slot.string)].slot = static_cast<int>(slots_.size()) - 1;
    else if (!symbols_.count(slot.string.substr(1))) bad_file("the frame has an unknown size");
  }
  for (const Json &row : plan.at("arena").list()) {
    const size_t buffer = buffer_named(row.at(size_t(0)).text());
    size_t owner = arena_.size();
    if (!row.at(3).text().empty()) {  // a chain leads to the first; each stands behind the one that it follows
      const size_t before = buffer_named(row.at(3).text());
      const auto found = std::find_if(arena_.begin(), arena_.end(), [&](const ArenaBuffer &a) { return a.buffer == before; });
      if (found == arena_.end()) bad_file("the arena is damaged");
      owner = found->owner;
    }
    buffers_[buffer].framed = static_cast<int>(arena_.size());
    arena_.push_back({buffer, row.at(1).whole(), row.at(2).whole(), owner});
  }
}

Program::Argument Program::read_argument(const Json &json) const {
  Argument made;
  if (json.is(Json::List)) {
    made.kind = Argument::Several;
    for (const Json &item : json.items) made.items.push_back(read_argument(item));
  } else if (const Json *buffer = json.find("buffer")) {
    made.kind = Argument::Tensor;
    made.buffer = buffer_named(buffer->text());
  } else if (const Json *number = json.find("number")) {
    made.kind = Argument::Number;
    made.buffer = buffer_named(number->text());
  } else if (const Json *size = json.find("size")) {
    made.kind = Argument::Size;
    made.size = Expr::read(*size, symbols_);
  } else if (const Json *hex = json.find("float")) {
    made.literal.kind = Json::Float;
    made.literal.number = std::strtod(hex->text().c_str(), nullptr);
  } else {
    const Json &literal = json.at("literal");
    made.literal = literal.at(1);
    if (literal.at(size_t(0)).text() == "complex") unsupported("an operator is called with a complex number");
  }
  return made;
}

Program::Extern Program::read_extern(const Json &step) const {
  Extern made;
  made.name = step.at(1).text();
  made.out = !step.at(5).is(Json::Null);
  const std::string &target = made.out ? step.at(5).text() : made.name;
  const size_t first = target.find('.'), last = target.rfind('.');
  if (first == std::string::npos || first == last) bad_file("the operator " + target + " has no full name");
  const std::string overload = target.substr(last + 1);
  const c10::OperatorName name(target.substr(0, first) + "::" + target.substr(first + 1, last - first - 1),
                               overload == "default" ? "" : overload);
  made.handle = c10::Dispatcher::singleton().findSchema(name);
  if (!made.handle) unsupported("this process has no operator " + target + "; load its library first");
  const auto &schema = made.handle->schema();
  made.arguments.resize(schema.arguments().size());
  made.given.resize(schema.arguments().size(), false);
  const auto give = [&](size_t position, Argument argument) {
    if (position >= made.given.size()) bad_file("the operator " + target + " has too many arguments");
    made.arguments[position] = std::move(argument);
    made.given[position] = true;
  };
  const std::vector<Json> &positional = step.at(2).list();
  for (size_t k = 0; k < positional.size(); ++k) give(k, read_argument(positional[k]));
  for (const Json &pair : step.at(3).list()) {
    const auto position = schema.argumentIndexWithName(pair.at(size_t(0)).text());
    if (!position) bad_file("the operator " + target + " has no argument " + pair.at(size_t(0)).text());
    give(static_cast<size_t>(*position), read_argument(pair.at(1)));
  }
  const auto &returns = schema.returns();
  made.several = returns.size() != 1 || returns[0].type()->kind() == c10::TypeKind::ListType;
  for (const Json &result : step.at(4).list()) {
    made.results.push_back(result.is(Json::Null) ? -1 : static_cast<int>(buffer_named(result.text())));
    made.conforms.push_back(true);
  }
  if (made.out) {
    if (made.results.size() != 1 || made.results[0] < 0) bad_file("the operator " + target + " has no single result");
    Argument out;
    out.kind = Argument::Tensor;
    out.buffer = static_cast<size_t>(made.results[0]);
    const auto position = schema.argumentIndexWithName("out");
    if (!position) unsupported("the operator " + target + " names its result otherwise");
    give(static_cast<size_t>(*position), std::move(out));
  }
  for (size_t k = 0; k < made.given.size(); ++k)
    if (!made.given[k] && !schema.arguments()[k].default_value()) bad_file("the operator " + target + " lacks an argument");
  return made;
}

void Program::read_steps(const Json &plan) {
  for (const Json &row : plan.at("steps").list()) {
    const std::string &kind = row.at(size_t(0)).text();
    Step step{};
    if (kind == "allocate") {
      step.kind = Step::Allocate;
      step.buffer = buffer_named(row.at(1).text());
    } else if (kind == "segment") {
      step.kind = Step::Segment;
      step.function = reinterpret_cast<int (*)(void *, int)>(object_->function(row.at(1).text()));
      for (const Json &launch : row.at(2).list()) step.launches.push_back(launch.text());
    } else if (kind == "extern" && row.at(1).text() == FixUp::NAME) {
      step.kind = Step::Fix;
      step.call = fix_ups_.size();
      fix_ups_.emplace_back(row.at(2), [this](const std::string &name) { return buffer_named(name); });
    } else if (kind == "extern") {
      step.kind = Step::Call;
      step.call = externs_.size();
      externs_.push_back(read_extern(row));
    } else if (kind == "view") {
      step.kind = Step::View;
      step.buffer = buffer_named(row.at(1).text());
      step.base = buffer_named(row.at(2).text());
      step.offset = Expr::read(row.at(3), symbols_);
      Buffer &result = buffers_[step.buffer];
      if (buffers_[step.base].framed >= 0 && buffers_[step.base].dtype == result.dtype) {  // the same in every call
        result.framed = static_cast<int>(arena_.size() + framed_.size());
        framed_.push_back({step.buffer, step.base, step.offset});
        continue;
      }
    } else if (kind == "reuse") {
      step.kind = Step::Reuse;
      step.buffer = buffer_named(row.at(1).text());
      step.base = buffer_named(row.at(2).text());
    } else if (kind == "free") {
      step.kind = Step::Free;
      for (const Json &name : row.at(1).list()) step.freed.push_back(buffer_named(name.text()));
    } else if (kind == "return") {
      step.kind = Step::Return;
      for (const Json &output : row.at(1).list())
        step.outputs.push_back(output.is(Json::Null) ? Argument() : read_argument(output));
    } else {
      unsupported("the launch plan has the step " + kind);
    }
    steps_.push_back(std::move(step));
  }
  if (steps_.empty() || steps_.back().kind != Step::Return) bad_file("the launch plan does not return");
}

int64_t Program::extent(const Buffer &buffer, const Values &values) const {
  int64_t last = 0;
  for (size_t k = 0; k < buffer.sizes.size(); ++k) {
    const int64_t count = buffer.sizes[k](values);
    if (count == 0) return 0;
    last += (count - 1) * buffer.strides[k](values);
  }
  return (last + 1) * static_cast<int64_t>(c10::elementSize(buffer.dtype));
}

// Offsets of the arena's buffers. Large ones first, each at the lowest place that is free throughout its life.
std::vector<int64_t> Program::place(const Values &values, int64_t &total) const {
  struct Life {
    size_t owner;
    int64_t nbytes, first, last;
  };
  struct Placed {
    int64_t begin, end, first, last;
  };
  std::vector<Life> lives;
  std::vector<size_t> life_of(arena_.size());
  for (size_t k = 0; k < arena_.size(); ++k) {
    const ArenaBuffer &entry = arena_[k];
    if (entry.owner == k) {
      life_of[k] = lives.size();
      lives.push_back({k, extent(buffers_[entry.buffer], values), entry.first, entry.last});
    } else {
      Life &life = lives[life_of[k] = life_of[entry.owner]];
      life.first = std::min(life.first, entry.first);
      life.last = std::max(life.last, entry.last);
    }
  }
  std::vector<size_t> order(lives.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::make_tuple(-lives[a].nbytes, lives[a].first) < std::make_tuple(-lives[b].nbytes, lives[b].first);
  });
  std::vector<Placed> placed;
  std::vector<int64_t> offsets(lives.size());
  total = 0;
  for (size_t number : order) {
    const Life &life = lives[number];
    const int64_t size = (std::max<int64_t>(life.nbytes, 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    int64_t offset = 0;
    for (const Placed &other : placed) {
      if (other.last < life.first || other.first > life.last || other.end <= offset) continue;
      if (other.begin >= offset + size) break;
      offset = other.end;
    }
    const Placed made{offset, offset + size, life.first, life.last};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), made,
                                   [](const Placed &a, const Placed &b) { return a.begin < b.begin; }),
                  made);
    offsets[number] = offset;
    total = std::max(total, offset + size);
  }
  std::vector<int64_t> result;
  for (size_t k = 0; k < arena_.size(); ++k) result.push_back(offsets[life_of[k]]);
  return result;
}

std::unique_ptr<Program::Frame> Program::new_frame(const Values &values) const {
  for (const Expr &size : wide_) size.look(values);  // kernels compute them without looking
  auto frame = std::make_unique<Frame>();
  int64_t total = 0;
  const std::vector<int64_t> offsets = place(values, total);
  frame->memory = at::empty({total + ALIGNMENT}, at::kByte);
  wish_huge_pages(frame->memory);
  const auto begin = reinterpret_cast<int64_t>(frame->memory.data_ptr());
  const int64_t start = (begin + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const auto add = [&](const Buffer &buffer, int64_t address) {
    frame->tensors.push_back(at::from_blob(reinterpret_cast<void *>(address), evaluate(buffer.sizes, values),
                                           evaluate(buffer.strides, values), at::TensorOptions(buffer.dtype)));
  };
  std::vector<int64_t> addresses;
  for (size_t k = 0; k < arena_.size(); ++k) {
    addresses.push_back(start + offsets[k]);
    add(buffers_[arena_[k].buffer], addresses.back());
  }
  for (const FramedView &view : framed_) {
    const Buffer &buffer = buffers_[view.buffer];
    const int64_t base = addresses[static_cast<size_t>(buffers_[view.base].framed)];
    addresses.push_back(base + view.offset(values) * static_cast<int64_t>(c10::elementSize(buffer.dtype)));
    add(buffer, addresses.back());
  }
  frame->entries.resize(std::max<size_t>(slots_.size(), 1));
  for (size_t k = 0; k < slots_.size(); ++k) {
    if (slots_[k][0] == '$') {
      frame->entries[k] = values[symbols_.at(slots_[k].substr(1))];
      continue;
    }
    const Buffer &buffer = buffers_[by_name_.at(slots_[k])];
    if (buffer.framed >= 0) frame->entries[k] = addresses[static_cast<size_t>(buffer.framed)];
    else if (buffer.storage == "constant") frame->entries[k] = address_of(constants_.at(buffer.name));
  }
  return frame;
}

Values Program::sizes_of(const std::vector<Value> &arguments) const {
  Values values;
  for (const Source &source : sources_) {
    const Value &given = arguments[source.input];
    switch (source.kind) {
      case Source::Integer: values.push_back(given.toInt()); break;
      case Source::Above: values.push_back(std::max<int64_t>(given.toInt(), 0)); break;
      case Source::Below: values.push_back(std::max<int64_t>(-given.toInt(), 0)); break;
      case Source::Size: values.push_back(given.toTensor().size(source.dim)); break;
      case Source::Stride: values.push_back(given.toTensor().stride(source.dim)); break;
    }
  }
  if (computed_.empty()) return values;
  std::unordered_map<std::string, int64_t> known;
  for (const auto &symbol : symbols_)
    if (symbol.second < values.size()) known.emplace("$" + symbol.first, values[symbol.second]);
  for (const auto &size : computed_) {
    values.push_back(integer_size(size.second, known));
    known.emplace("$" + size.first, values.back());
  }
  return values;
}

std::vector<Value> Program::run(const std::vector<Value> &arguments) {
  const Values values = sizes_of(arguments);
  std::unique_ptr<Frame> frame;
  {
    const std::lock_guard<std::mutex> held(lock_);
    for (size_t k = free_.size(); k-- > 0 && !frame;) {
      if (free_[k].first != values) continue;
      frame = std::move(free_[k].second);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  if (!frame) frame = new_frame(values);
  int threads = at::get_num_threads();
  if (threads > 1 && static_cast<int>(getpid()) != owner_) threads = 1;  // a forked child has no thread pool
  Call call{values, *frame, std::vector<at::Tensor>(buffers_.size()), {}, threads};
  for (size_t k = 0; k < buffers_.size(); ++k) {
    if (buffers_[k].framed >= 0) call.tensors[k] = frame->tensors[static_cast<size_t>(buffers_[k].framed)];
    else if (buffers_[k].storage == "constant") call.tensors[k] = constants_.at(buffers_[k].name);
  }
  for (size_t k = 0; k < inputs_.size(); ++k) {
    if (input_buffers_[k] < 0) continue;
    const auto position = static_cast<size_t>(input_buffers_[k]);
    call.tensors[position] = arguments[k].toTensor();
    write_slot(buffers_[position], call.tensors[position], call);
  }
  for (const Step &step : steps_) run_step(step, call);
  call.tensors.clear();
  const std::lock_guard<std::mutex> held(lock_);
  if (free_.size() >= KEPT_FRAMES) free_.erase(free_.begin());
  free_.emplace_back(values, std::move(frame));
  return std::move(call.results);
}

void Program::write_slot(const Buffer &buffer, const at::Tensor &tensor, Call &call) const {
  if (buffer.slot >= 0) call.frame.entries[static_cast<size_t>(buffer.slot)] = address_of(tensor);
}

void Program::run_step(const Step &step, Call &call) const {
  const Buffer &buffer = buffers_[step.buffer];
  at::Tensor &result = call.tensors[step.buffer];
  switch (step.kind) {
    case Step::Allocate:
      result = at::empty_strided(evaluate(buffer.sizes, call.values), evaluate(buffer.strides, call.values), buffer.dtype);
      wish_huge_pages(result);
      write_slot(buffer, result, call);
      break;
    case Step::Segment: {
      const int status = step.function(call.frame.entries.data(), call.threads);
      if (status == 0) break;
      const auto place = static_cast<size_t>((status >> 8) - 1);
      const std::string name = place < step.launches.size() ? step.launches[place] : "";
      const auto line = lines_.find(name);
      throw Error(AOTKIT_FAILED, (status & 1 ? std::string("an index is out of range for the dimension it selects from")
                                             : std::string("an integer was divided by zero")) +
                                     "\n  kernel " + name + (line == lines_.end() ? "" : ", from:\n" + line->second));
    }
    case Step::Fix: fix_ups_[step.call](call.tensors); break;
    case Step::Call: run_extern(externs_[step.call], call); break;
    case Step::View: {
      const at::Tensor &given = call.tensors[step.base];
      const at::Tensor base = given.scalar_type() == buffer.dtype ? given : given.view(buffer.dtype);
      result = base.as_strided(evaluate(buffer.sizes, call.values), evaluate(buffer.strides, call.values),
                               base.storage_offset() + step.offset(call.values));
      break;
    }
    case Step::Reuse: {
      const std::vector<int64_t> sizes = evaluate(buffer.sizes, call.values);
      const at::Tensor &base = call.tensors[step.base];
      result = base.sizes() == at::IntArrayRef(sizes) ? base : at::_unsafe_view(base, sizes);
      break;
    }
    case Step::Free:
      for (size_t freed : step.freed) call.tensors[freed] = at::Tensor();
      break;
    case Step::Return:
      for (const Argument &output : step.outputs) {
        if (output.kind == Argument::Tensor) call.results.emplace_back(call.tensors[output.buffer]);
        else if (output.kind == Argument::Size) call.results.emplace_back(output.size(call.values));
        else call.results.emplace_back();
      }
      break;
  }
}

Value Program::argument_value(const Argument &argument, const c10::TypePtr &given, Call &call) const {
  c10::TypePtr type = given;
  if (type->kind() == c10::TypeKind::OptionalType) {
    if (argument.kind == Argument::Literal && argument.literal.is(Json::Null)) return {};
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  const c10::TypeKind kind = type->kind();
  switch (argument.kind) {
    case Argument::Tensor: return call.tensors[argument.buffer];
    case Argument::Number: return call.tensors[argument.buffer].item();
    case Argument::Size:
      if (kind == c10::TypeKind::FloatType) return static_cast<double>(argument.size(call.values));
      return argument.size(call.values);
    case Argument::Several: {
      if (kind != c10::TypeKind::ListType) bad_file("an operator is given a list for a single value");
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      const bool is_size = element->kind() == c10::TypeKind::SymIntType;
      c10::impl::GenericList list(is_size ? c10::TypePtr(c10::IntType::get()) : element);
      for (const Argument &item : argument.items) list.push_back(argument_value(item, element, call));
      return list;
    }
    case Argument::Literal: break;
  }
  const Json &literal = argument.literal;
  switch (literal.kind) {
    case Json::Null: return {};
    case Json::Bool:
      if (kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType) return literal.flag;
      if (kind == c10::TypeKind::FloatType) return static_cast<double>(literal.flag);
      return static_cast<int64_t>(literal.flag);
    case Json::Int:
      if (kind == c10::TypeKind::FloatType) return static_cast<double>(literal.integer);
      return literal.integer;
    case Json::Float: return literal.number;
    case Json::String: {
      const std::string &text = literal.string;
      if (kind == c10::TypeKind::StringType) return text;
      if (kind == c10::TypeKind::DeviceObjType) return c10::Device(text);
      if (text == "torch.strided") return static_cast<int64_t>(at::kStrided);
      if (text == "torch.contiguous_format") return static_cast<int64_t>(at::MemoryFormat::Contiguous);
      if (text == "torch.channels_last") return static_cast<int64_t>(at::MemoryFormat::ChannelsLast);
      if (text == "torch.channels_last_3d") return static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d);
      if (text == "torch.preserve_format") return static_cast<int64_t>(at::MemoryFormat::Preserve);
      return static_cast<int64_t>(dtype_named(text));
    }
    default: bad_file("an operator has an argument of an unknown kind");
  }
}

void Program::run_extern(const Extern &extern_call, Call &call) const {
  const auto &arguments = extern_call.handle->schema().arguments();
  torch::jit::Stack stack;
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (extern_call.given[k]) stack.push_back(argument_value(extern_call.arguments[k], arguments[k].real_type(), call));
    else stack.push_back(*arguments[k].default_value());
  }
  extern_call.handle->callBoxed(stack);
  if (extern_call.out) return;
  if (extern_call.several) {  // the elements of a list stand in a row with the other results
    torch::jit::Stack row;
    for (const c10::IValue &given : stack) {
      if (!given.isList()) row.push_back(given);
      else for (const c10::IValue &element : given.toListRef().vec()) row.push_back(element);
    }
    stack = std::move(row);
  }
  for (size_t k = 0; k < extern_call.results.size(); ++k) {
    if (extern_call.results[k] < 0) continue;
    if (k >= stack.size() || !stack[k].isTensor())
      throw Error(AOTKIT_FAILED, "the operator " + extern_call.name + " gave another number of results than it declares");
    const auto number = static_cast<size_t>(extern_call.results[k]);
    const Buffer &buffer = buffers_[number];
    at::Tensor value = stack[k].toTensor();
    const bool plain = value.defined() && value.layout() == at::kStrided;
    if (plain) {
      // What reads it goes by the sizes and strides that were compiled for.
      const auto sizes = evaluate(buffer.sizes, call.values), strides = evaluate(buffer.strides, call.values);
      value = value.resolve_conj().resolve_neg();
      if (value.sizes() != at::IntArrayRef(sizes))
        throw Error(AOTKIT_FAILED, "the operator " + extern_call.name + " gave a result of another shape than it declares");
      bool same = value.scalar_type() == buffer.dtype;
      for (size_t d = 0; d < sizes.size() && value.numel() > 0; ++d)
        same = same && (sizes[d] <= 1 || value.stride(static_cast<int64_t>(d)) == strides[d]);
      if (!same) value = at::empty_strided(sizes, strides, buffer.dtype).copy_(value);
      write_slot(buffer, value, call);
    }
    call.tensors[number] = std::move(value);
  }
}

}  // namespace aotkit

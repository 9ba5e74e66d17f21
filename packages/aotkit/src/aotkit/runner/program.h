// A compiled graph: its launch plan, run step by step. The same as runtime/emit.py and runtime/frame.py of
// inductor-lower do in Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fix_up.h"
#include "object.h"
#include "sizes.h"

namespace aotkit {

using Value = c10::IValue;  // a tensor, an integer or nothing

at::ScalarType dtype_named(const std::string &name);  // "float32" or "torch.float32"; throws Error

class Program {
 public:
  // `json`: the section of a graph; `constants`: its tensors by name. Throws Error.
  Program(const Json &json, std::unordered_map<std::string, at::Tensor> constants);
  ~Program();

  size_t num_inputs() const { return inputs_.size(); }
  std::vector<Value> run(const std::vector<Value> &arguments);  // by any number of threads at once

 private:
  struct Buffer {
    std::string name;
    at::ScalarType dtype;
    Exprs sizes, strides;
    std::string storage;
    int slot = -1;    // in the frame
    int framed = -1;  // among the tensors of a frame
  };
  struct ArenaBuffer {
    size_t buffer;
    int64_t first, last;
    size_t owner;  // whose memory it takes
  };
  struct FramedView {
    size_t buffer, base;
    Expr offset;
  };
  struct Argument {
    enum Kind { Tensor, Number, Size, Literal, Several } kind = Literal;
    size_t buffer = 0;
    Expr size;
    Json literal;
    std::vector<Argument> items;
  };
  struct Extern {
    std::string name;
    std::optional<c10::OperatorHandle> handle;
    std::vector<Argument> arguments;  // by position in the schema
    std::vector<bool> given;
    std::vector<int> results;  // buffers, -1 for one that is dropped
    std::vector<bool> conforms;
    bool out = false;
    bool several = false;
  };
  struct Step {
    enum Kind { Allocate, Segment, Call, Fix, View, Reuse, Free, Return } kind;
    size_t buffer = 0, base = 0;
    Expr offset;
    int (*function)(void *, int) = nullptr;
    std::vector<std::string> launches;
    size_t call = 0;
    std::vector<size_t> freed;
    std::vector<Argument> outputs;
  };
  struct Source {
    enum Kind { Integer, Size, Stride, Above, Below } kind;
    size_t input;
    int64_t dim;
  };
  struct Frame {
    std::vector<int64_t> entries;
    at::Tensor memory;
    std::vector<at::Tensor> tensors;
  };
  struct Call;  // what one call holds

  void read_buffers(const Json &plan);
  void read_steps(const Json &plan);
  Extern read_extern(const Json &step) const;
  Argument read_argument(const Json &json) const;
  size_t buffer_named(const std::string &name) const;
  std::unique_ptr<Frame> new_frame(const Values &values) const;
  std::vector<int64_t> place(const Values &values, int64_t &total) const;
  int64_t extent(const Buffer &buffer, const Values &values) const;
  Values sizes_of(const std::vector<Value> &arguments) const;
  void run_step(const Step &step, Call &call) const;
  void run_extern(const Extern &call, Call &state) const;
  void write_slot(const Buffer &buffer, const at::Tensor &tensor, Call &call) const;
  Value argument_value(const Argument &argument, const c10::TypePtr &type, Call &call) const;

  std::string name_;
  std::vector<Buffer> buffers_;
  std::unordered_map<std::string, size_t> by_name_;
  std::vector<std::string> inputs_;
  std::vector<int> input_buffers_;  // -1 for an integer
  std::vector<std::string> slots_;
  std::vector<ArenaBuffer> arena_;
  std::vector<FramedView> framed_;
  std::vector<Step> steps_;
  std::vector<Extern> externs_;
  std::vector<FixUp> fix_ups_;
  std::vector<Source> sources_;
  std::vector<std::pair<std::string, Json>> computed_;  // sizes that are computed with floats, after those of sources_
  Exprs wide_;  // what kernels might compute as another number than we do: see symbolic/wide.py of inductor-lower
  Names symbols_;
  std::unordered_map<std::string, at::Tensor> constants_;
  std::unordered_map<std::string, std::string> lines_;  // of kernels, in the user's program
  std::unique_ptr<Object> object_;
  int owner_ = 0;

  std::mutex lock_;
  std::vector<std::pair<Values, std::unique_ptr<Frame>>> free_;
};

std::string from_base64(const std::string &text);

}  // namespace aotkit

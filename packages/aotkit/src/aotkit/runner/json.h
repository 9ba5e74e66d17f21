// JSON as Python's json module writes it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace aotkit {

class Json {
 public:
  enum Kind { Null, Bool, Int, Float, String, List, Object };

  static Json parse(std::string_view text);  // throws Error

  Kind kind = Null;
  bool flag = false;
  int64_t integer = 0;
  double number = 0;
  std::string string;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;

  bool is(Kind other) const { return kind == other; }
  const Json *find(std::string_view name) const;    // null if there is none
  const Json &at(std::string_view name) const;      // throws Error if there is none
  const Json &at(size_t position) const;            // the same
  const std::string &text() const;                  // throws Error if it is no string
  int64_t whole() const;                            // throws Error if it is no integer
  const std::vector<Json> &list() const;            // throws Error if it is no list
  bool truth() const { return flag; }
};

}  // namespace aotkit

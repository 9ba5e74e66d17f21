#include "json.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "errors.h"

namespace aotkit {
namespace {

constexpr int MOST_NESTED = 200;

class Parser {
 public:
  explicit Parser(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  Json whole() {
    Json value = read(0);
    skip();
    if (at_ != end_) wrong();
    return value;
  }

 private:
  [[noreturn]] void wrong() const { bad_file("a part of the file is no JSON, so it is damaged"); }

  void skip() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  bool take(char wanted) {
    skip();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }

  bool word(std::string_view wanted) {
    if (static_cast<size_t>(end_ - at_) < wanted.size() || std::string_view(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  Json read(int depth) {
    if (depth > MOST_NESTED) wrong();
    skip();
    if (at_ == end_) wrong();
    Json value;
    if (*at_ == '{') {
      ++at_;
      value.kind = Json::Object;
      if (take('}')) return value;
      do {
        skip();
        std::string name = quoted();
        if (!take(':')) wrong();
        value.members.emplace_back(std::move(name), read(depth + 1));
      } while (take(','));
      if (!take('}')) wrong();
    } else if (*at_ == '[') {
      ++at_;
      value.kind = Json::List;
      if (take(']')) return value;
      do value.items.push_back(read(depth + 1));
      while (take(','));
      if (!take(']')) wrong();
    } else if (*at_ == '"') {
      value.kind = Json::String;
      value.string = quoted();
    } else if (word("null")) {
    } else if (word("true")) {
      value.kind = Json::Bool;
      value.flag = true;
    } else if (word("false")) {
      value.kind = Json::Bool;
    } else {
      number(value);
    }
    return value;
  }

  void number(Json &value) {
    value.kind = Json::Float;
    if (word("NaN")) {
      value.number = std::numeric_limits<double>::quiet_NaN();
    } else if (word("Infinity")) {
      value.number = HUGE_VAL;
    } else if (word("-Infinity")) {
      value.number = -HUGE_VAL;
    } else {
      const char *begin = at_;
      bool whole = true;
      for (; at_ != end_ && ((*at_ >= '0' && *at_ <= '9') || std::string_view("+-.eE").find(*at_) != std::string_view::npos);
           ++at_)
        whole = whole && *at_ != '.' && *at_ != 'e' && *at_ != 'E';
      const std::string text(begin, at_);
      char *stop = nullptr;
      errno = 0;
      if (whole) {
        value.kind = Json::Int;
        value.integer = std::strtoll(text.c_str(), &stop, 10);
      } else {
        value.number = std::strtod(text.c_str(), &stop);
      }
      if (text.empty() || *stop != '\0' || (whole && errno)) wrong();
    }
  }

  std::string quoted() {
    if (at_ == end_ || *at_ != '"') wrong();
    ++at_;
    std::string text;
    while (at_ != end_ && *at_ != '"') {
      if (*at_ != '\\') {
        text += *at_++;
        continue;
      }
      if (++at_ == end_) wrong();
      static const std::string_view names = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
      const char name = *at_++;
      const size_t place = names.find(name);
      if (place != std::string_view::npos) {
        text += values[place];
      } else if (name == 'u') {
        unicode(text);
      } else {
        wrong();
      }
    }
    if (at_ == end_) wrong();
    ++at_;
    return text;
  }

  uint32_t hex() {
    if (end_ - at_ < 4) wrong();
    const std::string digits(at_, at_ + 4);
    char *stop = nullptr;
    const uint32_t code = static_cast<uint32_t>(std::strtoul(digits.c_str(), &stop, 16));
    if (*stop) wrong();
    at_ += 4;
    return code;
  }

  void unicode(std::string &text) {
    uint32_t code = hex();
    if (code >= 0xD800 && code < 0xDC00 && word("\\u")) code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
    if (code < 0x80) {
      text += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint32_t heads[] = {0, 0xC0, 0xE0, 0xF0};
    text += static_cast<char>(heads[more] | (code >> (6 * more)));
    for (int k = more - 1; k >= 0; --k) text += static_cast<char>(0x80 | ((code >> (6 * k)) & 0x3F));
  }

  const char *at_, *end_;
};

}  // namespace

Json Json::parse(std::string_view text) { return Parser(text).whole(); }

const Json *Json::find(std::string_view name) const {
  for (const auto &[key, value] : members)
    if (key == name) return &value;
  return nullptr;
}

const Json &Json::at(std::string_view name) const {
  const Json *found = find(name);
  if (found == nullptr) bad_file("the file lacks the entry " + std::string(name));
  return *found;
}

const Json &Json::at(size_t position) const {
  if (kind != List || position >= items.size()) bad_file("a list in the file is too short, so it is damaged");
  return items[position];
}

const std::string &Json::text() const {
  if (kind != String) bad_file("an entry of the file is no text, so it is damaged");
  return string;
}

int64_t Json::whole() const {
  if (kind != Int) bad_file("an entry of the file is no whole number, so it is damaged");
  return integer;
}

const std::vector<Json> &Json::list() const {
  if (kind != List) bad_file("an entry of the file is no list, so it is damaged");
  return items;
}

}  // namespace aotkit

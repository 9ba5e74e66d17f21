#include "processor.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <unordered_map>

namespace aotkit {
namespace {

std::string plain(std::string name) {
  name.erase(std::remove_if(name.begin(), name.end(), [](char c) { return c == '_' || c == '-' || c == '.'; }), name.end());
  return name;
}

std::set<std::string> read_flags() {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> found;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) found.insert(plain(word));
    break;
  }
  return found;
}

// Linux's names, where they are not LLVM's.
const std::unordered_map<std::string, std::string> NAMES = {
    {"64bit", "lm"}, {"bmi", "bmi1"}, {"crc32", "sse42"}, {"lzcnt", "abm"}, {"pclmul", "pclmulqdq"}, {"sse3", "pni"}, {"rdrnd", "rdrand"}};

// Instructions for systems and for secrets, which no kernel of a package has: not looked at.
const std::set<std::string> UNUSED = {
    "adx", "aes", "avx101", "avx102", "cldemote", "clflushopt", "clwb", "clzero", "cmpccxadd", "enqcmd", "fsgsbase",
    "fxsr", "invpcid", "kl", "mmx", "movdir64b", "movdiri", "mwaitx", "pconfig", "pku", "prefetchi", "prefetchwt1",
    "prfchw", "ptwrite", "raoint", "rdpid", "rdpru", "rdrand", "rdseed", "rtm", "sahf", "serialize", "sgx", "sha",
    "sha512", "shstk", "sm3", "sm4", "tsxldtrk", "uintr", "usermsr", "vaes", "waitpkg", "wbnoinvd", "widekl", "xsave",
    "xsavec", "xsaveopt", "xsaves", "hreset", "pclmulqdq", "vpclmulqdq"};

}  // namespace

std::string missing_feature(const std::vector<std::string> &features) {
  static const std::set<std::string> flags = read_flags();
  for (const std::string &feature : features) {
    const auto named = NAMES.find(feature);
    const std::string flag = named == NAMES.end() ? plain(feature) : named->second;
    if (!UNUSED.count(flag) && !flags.count(flag)) return feature;
  }
  return "";
}

}  // namespace aotkit

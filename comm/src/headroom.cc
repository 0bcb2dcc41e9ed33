#include "headroom.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace afd_comm {
namespace {

// One of the two cgroup versions, as files below its mount point.
struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* reclaimable;  // key in memory.stat: page cache that makes room when it must
};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file"};

// A file that is missing or says "max" sets no limit.
std::optional<uint64_t> number_in(const std::string& path) {
  uint64_t value = 0;
  if (std::ifstream(path) >> value) return value;
  return std::nullopt;
}

std::optional<uint64_t> value_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    uint64_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return std::nullopt;
}

void lower(Headroom& headroom, uint64_t bytes, const std::string& limit) {
  if (bytes < headroom.bytes) headroom = {bytes, limit};
}

// The group's own limit and those of the groups it lies in.
void look_up_from(Headroom& headroom, const std::string& mount, std::string path,
                  const CgroupFiles& files) {
  while (true) {
    const std::string folder = mount + path + "/";
    const auto limit = number_in(folder + files.limit);
    const auto used = number_in(folder + files.used);
    if (limit && used) {
      const uint64_t cache = value_of(folder + "memory.stat", files.reclaimable).value_or(0);
      const uint64_t held = *used - std::min(*used, cache);
      lower(headroom, *limit - std::min(*limit, held),
            "the cgroup memory limit of " + std::to_string(*limit) + " bytes");
    }
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return;
    path.resize(slash);
  }
}

}  // namespace

Headroom memory_headroom() {
  Headroom headroom;
  const auto available = value_of("/proc/meminfo", "MemAvailable:");
  if (available) lower(headroom, *available * 1024, "the host's memory");
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controller = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controller == "memory") look_up_from(headroom, "/sys/fs/cgroup/memory", path, kV1);
    if (controller.empty()) {
      look_up_from(headroom, "/sys/fs/cgroup", path, kV2);
      look_up_from(headroom, "/sys/fs/cgroup/unified", path, kV2);
    }
  }
  return headroom;
}

}  // namespace afd_comm

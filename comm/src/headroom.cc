#include "headroom.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "afd_comm/process.h"

namespace afd_comm {
namespace {

// One of the two cgroup versions, as files below its mount point.
struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* reclaimable;  // key in memory.stat: page cache that the kernel can free
};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file"};

std::string text_of(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text(1 << 16, '\0');  // memory.stat and /proc/meminfo are some thousand bytes
  const ssize_t n = fd ? read(fd.get(), text.data(), text.size()) : -1;
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return text;
}

// Without std::ifstream: in a process with PyTorch's CUDA wheel it read every number as 0.
std::optional<uint64_t> leading_number(const char* text) {
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 10);
  if (end == text) return std::nullopt;
  return value;
}

// A missing file, or one that says "max", sets no limit.
std::optional<uint64_t> number_in(const std::string& path) {
  return leading_number(text_of(path).c_str());
}

std::optional<uint64_t> value_of(const std::string& path, const std::string& key) {
  const std::string text = "\n" + text_of(path);
  const std::size_t found = text.find("\n" + key + " ");
  if (found == std::string::npos) return std::nullopt;
  return leading_number(text.c_str() + found + key.size() + 1);
}

void lower(Headroom& headroom, uint64_t bytes, const std::string& limit) {
  if (bytes < headroom.bytes) headroom = {bytes, limit};
}

// The limits of the group and of all its ancestors.
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
  const std::string groups = text_of("/proc/self/cgroup");
  for (std::size_t start = 0; start < groups.size();) {
    const std::size_t end = std::min(groups.find('\n', start), groups.size());
    const std::string line = groups.substr(start, end - start);
    start = end + 1;
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

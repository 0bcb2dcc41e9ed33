// How much more memory this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace afd_comm {

struct Headroom {
  uint64_t bytes = UINT64_MAX;
  std::string limit;  // what sets the limit, for error messages
};

// The minimum of the host's free memory and what the cgroups of this process allow. Using more does
// not fail: the kernel kills some process instead.
Headroom memory_headroom();

}  // namespace afd_comm

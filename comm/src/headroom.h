// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <string>

namespace afd_comm {

struct Headroom {
  uint64_t bytes = UINT64_MAX;
  std::string limit;  // what sets it, for a message
};

// The least of what the host has left and what the cgroups of this process allow. Taking more does
// not fail: the kernel kills a process of its choice instead.
Headroom memory_headroom();

}  // namespace afd_comm

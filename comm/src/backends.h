// What a backend provides, and the list of backends.
//
// To add a backend: write one file that defines a Backend, and add its name to AFD_COMM_BACKENDS.
#pragma once

#include "afd_comm/link.h"
#include "afd_comm/region.h"

namespace afd_comm {

struct Backend {
  const char* name;         // what LinkOptions::backend selects; also the scheme of its addresses
  bool sends_from_devices;  // whether a message's parts may be device memory

  // Connects to a region. Throws CommError.
  std::unique_ptr<Link> (*open_link)(const std::string& address, const LinkOptions& options);

  // Starts the receiving side for `memory`, which must outlive it. Returns null if `options` do not
  // ask for this backend. The function itself is null if peers write into the region directly.
  // Throws CommError.
  std::unique_ptr<Receiver> (*open_receiver)(const Memory& memory, const Token& token,
                                             const RegionOptions& options) = nullptr;

  // Whether this backend also accepts an address of another backend's scheme. May be null.
  bool (*accepts)(const std::string& scheme, const LinkOptions& options) = nullptr;
};

// In order of preference for backend "auto".
#define AFD_COMM_BACKENDS(BACKEND) \
  BACKEND(ipc_backend)             \
  BACKEND(shm_backend)             \
  BACKEND(verbs_backend)           \
  BACKEND(tcp_backend)

#define AFD_COMM_DECLARE(name) extern const Backend name;
AFD_COMM_BACKENDS(AFD_COMM_DECLARE)
#undef AFD_COMM_DECLARE

// Starts a receiver of every backend that `options` ask for. Throws CommError.
std::vector<std::unique_ptr<Receiver>> open_receivers(const Memory& memory, const Token& token,
                                                      const RegionOptions& options);

}  // namespace afd_comm

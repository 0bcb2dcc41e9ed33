// Backend verbs: the receiving side.
#pragma once

#include <memory>

#include "afd_comm/region.h"

namespace afd_comm {

// Registers the payloads of `memory`, which must outlive it, with the NICs of options.verbs and
// lets peers write into them. Returns null without verbs options. Throws CommError.
std::unique_ptr<Receiver> open_verbs_receiver(const Memory& memory, const Token& token,
                                              const RegionOptions& options);

}  // namespace afd_comm

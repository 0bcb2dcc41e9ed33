// Backend verbs: registering memory with a NIC.
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "verbs_nic.h"

namespace afd_comm {
namespace {

std::string locked_memory_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

[[noreturn]] void refused(const Nic& nic, uint64_t nbytes, const std::string& device, int error) {
  const std::string what = "cannot register " + std::to_string(nbytes) + " bytes of " + device +
                           " memory with " + nic.name() + ": " + errno_text(error);
  if (device != "cpu")
    throw CommError(what +
                    "; GPU memory needs dma-buf export (kernel 5.12, open GPU driver) or the "
                    "nvidia-peermem module (modprobe nvidia-peermem)");
  if (error == ENOMEM || error == EPERM || error == EAGAIN)
    throw CommError(what + "; the limit of locked memory is " + locked_memory_limit() +
                    ": raise it with `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity, "
                    "docker: --ulimit memlock=-1, all users: /etc/security/limits.conf)");
  throw CommError(what + "; look at the kernel's log");
}

}  // namespace

Registration::Registration(std::shared_ptr<Nic> nic, void* address, uint64_t nbytes,
                           unsigned access, const std::string& device)
    : nic_(std::move(nic)) {
  const Verbs& verbs = nic_->verbs();
  // Relaxed PCIe ordering is safe here, since nobody looks at memory before its completion, and
  // fast NICs need it for their full rate.
  if (verbs.reg_mr_iova2 != nullptr) {
    mr_ = verbs.reg_mr_iova2(nic_->pd(), address, nbytes, reinterpret_cast<uintptr_t>(address),
                             access | ib::kRelaxedOrdering);
  } else {
    mr_ = verbs.reg_mr(nic_->pd(), address, nbytes, static_cast<int>(access));
  }
  if (mr_ == nullptr) refused(*nic_, nbytes, device, errno);
}

Registration::Registration(Registration&& other) noexcept
    : nic_(std::move(other.nic_)), mr_(std::exchange(other.mr_, nullptr)) {}

Registration::~Registration() {
  if (mr_ != nullptr) nic_->verbs().dereg_mr(mr_);
}

}  // namespace afd_comm

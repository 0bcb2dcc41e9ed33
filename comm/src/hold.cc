#include "afd_comm/hold.h"

#include <atomic>

#include "afd_comm/memory.h"

namespace afd_comm {

// A page of their own, because a driver refuses to page-lock a page twice. The device writes one
// and the CPU the other, so each has its line.
struct alignas(kPage) Hold::Words {
  alignas(kLine) std::atomic<uint64_t> left{0};    // number of the last step that is complete
  alignas(kLine) std::atomic<uint64_t> closed{0};  // 1: the stream waits
};

Hold::Hold(Device device)
    : accelerator_(open_accelerator(device)),
      words_(std::make_unique<Words>()),
      pinned_(accelerator_, words_.get(), sizeof(Words)) {}

Hold::~Hold() { open(); }

uint64_t Hold::enqueue(Stream stream) {
  const uint64_t step = ++steps_;
  const StreamOp ops[] = {
      {StreamOp::Kind::Write, pinned_.at(&words_->left), step},
      {StreamOp::Kind::WaitEqual, pinned_.at(&words_->closed), 0},
  };
  accelerator_->run(stream, ops, 2);
  return step;
}

bool Hold::close(uint64_t step) {
  // The stream writes first and then looks; here it is the other way round. So one of the two sees
  // the other's write.
  words_->closed.store(1, std::memory_order_seq_cst);
  if (words_->left.load(std::memory_order_seq_cst) < step) return true;
  open();
  return false;
}

void Hold::open() { words_->closed.store(0, std::memory_order_release); }

bool Hold::closed() const { return words_->closed.load(std::memory_order_relaxed) != 0; }

}  // namespace afd_comm

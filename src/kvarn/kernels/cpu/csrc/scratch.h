// Working memory of one thread: one buffer that grows and is kept, cut into parts by a moving offset.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(base_); }

  // Make room for n_bytes in all and start cutting from the beginning. What was taken before is gone.
  void reset(int64_t n_bytes) {
    used_ = 0;
    if (n_bytes + kAlign <= size_) return;
    free(base_);
    size_ = (n_bytes + kAlign + 65535) / 65536 * 65536;
    base_ = static_cast<uint8_t*>(aligned_alloc(kAlign, size_));
    if (base_ == nullptr) abort();
  }
  template <class T>
  T* take(int64_t n) {
    T* at = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes<T>(n);
    if (used_ > size_) abort();  // a size computed wrongly: stop before memory is spoilt
    return at;
  }
  template <class T>
  static int64_t bytes(int64_t n) {
    return (n * int64_t(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
  }

 private:
  static constexpr int64_t kAlign = 64;
  uint8_t* base_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

thread_local Scratch thread_scratch;  // what a work item needs
thread_local Scratch call_scratch;    // what the calling thread keeps over a call

}  // namespace

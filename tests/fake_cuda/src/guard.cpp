// A device guard for CUDA in a torch without CUDA: indexing and other functions of torch set the current device first.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;

std::atomic<const c10::impl::DeviceGuardImplInterface*>& entry() {
    return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
}

}  // namespace

extern "C" void set_guard(int is_set) {
    static const Guard guard;
    entry().store(is_set ? &guard : nullptr);
}

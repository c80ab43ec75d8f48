// A stand-in for libcudart.so.12, over the stand-in for the driver, with the calls of the driver that
// only Mooncake's build for CUDA makes: what that build asks for to be loaded, and to move host
// memory by tcp. Calls that need more are refused, and say so. Numbers without a name are those of
// cuda.h and driver_types.h.
//
// Build: make build/standin/libcudart.so.12
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

extern int cuInit(unsigned), cuDeviceGetCount(int *);
extern int cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801, UNREGISTERED = 0 };

static __thread int current;

int cudaGetDeviceCount(int *number) {
    cuInit(0);
    return cuDeviceGetCount(number);
}

int cudaGetDevice(int *device) {
    *device = current;
    return SUCCESS;
}

int cudaSetDevice(int device) {  // which makes the device's primary context, as CUDA 12 does
    void *context;
    cuInit(0);
    int result = cuDevicePrimaryCtxRetain(&context, device);
    if (!result) result = cuCtxSetCurrent(context);
    if (!result) current = device;
    return result;
}

const char *cudaGetErrorString(int error) {
    static __thread char text[32];
    snprintf(text, sizeof text, "error %d", error);
    return text;
}

int cudaGetLastError(void) { return SUCCESS; }

struct attributes { int type, device; void *on_device, *on_host; };

int cudaPointerGetAttributes(struct attributes *found, const void *pointer) {
    *found = (struct attributes){UNREGISTERED, -2, NULL, (void *)pointer};
    return SUCCESS;
}

// All memory is the host's, and the driver knows nothing of it.
int cuPointerGetAttribute(void *found, int attribute, uint64_t pointer) {
    (void)found, (void)attribute, (void)pointer;
    return INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text) {
    *text = cudaGetErrorString(error);
    return SUCCESS;
}

#define REFUSED(name) \
    int name(void) { \
        fprintf(stderr, "[libcudart stand-in] %s is refused\n", #name); \
        return NOT_SUPPORTED; \
    }
REFUSED(cuMemGetAddressRange_v2)
REFUSED(cuMemGetHandleForAddressRange)
REFUSED(cuPointerSetAttribute)
REFUSED(cudaDeviceCanAccessPeer)
REFUSED(cudaDeviceEnablePeerAccess)
REFUSED(cudaDeviceGetPCIBusId)
REFUSED(cudaEventCreateWithFlags)
REFUSED(cudaEventDestroy)
REFUSED(cudaEventRecord)
REFUSED(cudaEventSynchronize)
REFUSED(cudaFree)
REFUSED(cudaFreeHost)
REFUSED(cudaGetDeviceProperties_v2)
REFUSED(cudaHostAlloc)
REFUSED(cudaHostGetDevicePointer)
REFUSED(cudaHostRegister)
REFUSED(cudaHostUnregister)
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaLaunchHostFunc)
REFUSED(cudaMalloc)
REFUSED(cudaMemcpy)
REFUSED(cudaMemcpyBatchAsync)
REFUSED(cudaMemset)
REFUSED(cudaMemsetAsync)
REFUSED(cudaStreamCreateWithFlags)
REFUSED(cudaStreamDestroy)
REFUSED(cudaStreamQuery)
REFUSED(cudaStreamSynchronize)

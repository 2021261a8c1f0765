// A CUDA driver for tests of how calls reach it, as libcuda.so.1: it notes what each call brings, device memory is this
// process's, a context is a number. An allocation's IPC handle is its address and then 56 bytes that tell their places.
// Memory that is mapped is a file: its handle is a descriptor, and a fabric handle has that one's number and 60 bytes.

#define _GNU_SOURCE
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, PEER_ACCESS_ALREADY_ENABLED = 704 };
enum { NOT_PERMITTED = 800, CLUSTER_DIMENSION = 4, DESCRIPTOR = 1, FABRIC = 8 };
typedef uint64_t u64;
typedef struct { int id; char pad[4]; char value[64]; } Attribute;
typedef struct { unsigned grid[3], block[3], smem; void *stream; Attribute *attributes; unsigned count; } Config;
typedef struct { unsigned char bytes[64]; } Handle;
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location at; void *win32; unsigned char compression, rdma; } Properties;
typedef struct { Location at; int flags; } Access;

static char notes[1 << 16];
static u64 current;

static void note(const char *format, ...) {
    size_t used = strlen(notes);
    va_list rest;
    va_start(rest, format);
    used += vsnprintf(notes + used, sizeof notes - used, format, rest);
    va_end(rest);
    strcpy(notes + used, "\n");
}

const char *stub_notes(void) { return notes; }
void stub_forget(void) { notes[0] = 0; }

static int get_current(u64 *context) { *context = current; return SUCCESS; }
static int set_current(u64 context) { note("set_current %lu", context); current = context; return SUCCESS; }
static int get_device(int *device, int ordinal) { *device = ordinal + 10; return SUCCESS; }
static int retain(u64 *context, int device) { note("retain %d", device); *context = 100 + device; return SUCCESS; }
static int enable_peer(u64 context, unsigned flags) {
    note("enable_peer %lu %u", context, flags);
    return context == 1 ? PEER_ACCESS_ALREADY_ENABLED : context == 2 ? INVALID_VALUE : SUCCESS;
}
static int load(u64 *library, const char *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    note("load %s %u %u", code, c, f);
    *library = 7;
    return SUCCESS;
}
static int unload(u64 library) { note("unload %lu", library); return SUCCESS; }
static int get_kernel(u64 *kernel, u64 library, const char *name) {
    note("get_kernel %lu %s", library, name);
    *kernel = 8;
    return SUCCESS;
}
static int get_function(u64 *function, u64 kernel) { note("get_function %lu", kernel); *function = 9; return SUCCESS; }
static int set_attribute(u64 function, int attribute, int value) {
    note("set_attribute %lu %d %d", function, attribute, value);
    return SUCCESS;
}
static int launch_ex(const Config *of, u64 function, void **parameters, void **extra) {
    if (current == 404) return INVALID_CONTEXT;
    note("launch_ex %lu: grid %u %u %u, block %u %u %u, %u bytes, stream %lu, %ld %ld, %d", function, of->grid[0],
         of->grid[1], of->grid[2], of->block[0], of->block[1], of->block[2], of->smem, (u64)of->stream,
         *(int64_t *)parameters[0], *(int64_t *)parameters[1], extra != NULL);
    for (unsigned i = 0; i < of->count; i++) {
        const int *value = (const int *)of->attributes[i].value;
        if (of->attributes[i].id == CLUSTER_DIMENSION) note("attribute 4 %d %d %d", value[0], value[1], value[2]);
        else note("attribute %d %d", of->attributes[i].id, value[0]);
    }
    return SUCCESS;
}
static int launch(u64 function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned smem, u64 stream, void **parameters, void **extra) {
    note("launch %lu: grid %u %u %u, block %u %u %u, %u bytes, stream %lu, %lu %u, %d", function, gx, gy, gz, bx, by, bz, smem, stream,
         *(u64 *)parameters[0], *(unsigned *)parameters[1], extra != NULL);
    return SUCCESS;
}
static int wait_value(u64 stream, u64 address, unsigned value, unsigned flags) {
    note("wait_value %lu %lu %u %u", stream, address, value, flags);
    return SUCCESS;
}
static int create_stream(u64 *stream, unsigned flags) { note("create_stream %u", flags); *stream = 21; return SUCCESS; }
static int exchange_mode(int *mode) { note("capture_mode %d", *mode); *mode = 0; return SUCCESS; }
static int allocate(u64 *address, size_t count) {
    note("allocate %zu", count);
    if (count > 1 << 20) return count == 1 << 30 ? INVALID_VALUE : OUT_OF_MEMORY;
    *address = (u64)malloc(count);
    return SUCCESS;
}
static int release(u64 address) {
    note("free");
    free((void *)address);
    return SUCCESS;
}
static int set_bytes(u64 address, unsigned char byte, size_t count) {
    memset((void *)address, byte, count);
    return SUCCESS;
}
static int set_words(u64 address, unsigned word, size_t count) {
    for (size_t i = 0; i < count; i++) ((unsigned *)address)[i] = word;
    return SUCCESS;
}
static int write_to(u64 to, const void *from, size_t count) { memcpy((void *)to, from, count); return SUCCESS; }
static int copy(u64 to, u64 from, size_t count, u64 stream) {
    note("copy %zu on %lu", count, stream);
    memcpy((void *)to, (void *)from, count);
    return SUCCESS;
}
static int allocate_host(void **address, size_t count, unsigned flags) {
    note("allocate_host %zu %u", count, flags);
    *address = malloc(count);
    return SUCCESS;
}
static int free_host(void *address) { note("free_host"); free(address); return SUCCESS; }
static int get_granularity(size_t *found, const Properties *of, int option) {
    note("granularity %d %d, on %d %d, %d", of->type, of->handles, of->at.type, of->at.id, option);
    *found = 1 << 16;
    return SUCCESS;
}
static int create_memory(u64 *memory, size_t count, const Properties *of, u64 flags) {
    note("create %zu: %d %d, on %d %d, %p %d %d, %lu", count, of->type, of->handles, of->at.type, of->at.id, of->win32,
         of->compression, of->rdma, flags);
    if (count > 1 << 20) return count == 1 << 30 ? NOT_PERMITTED : OUT_OF_MEMORY;
    int file = memfd_create("memory", 0);
    *memory = file;
    return ftruncate(file, count) ? INVALID_VALUE : SUCCESS;
}
static int release_memory(u64 memory) { note("release"); return close(memory) ? INVALID_VALUE : SUCCESS; }
static int export_memory(void *handle, u64 memory, int type, u64 flags) {
    note("export %d %lu", type, flags);
    if (type == DESCRIPTOR) *(int *)handle = dup(memory);
    else for (int i = 0; i < 64; i++) ((unsigned char *)handle)[i] = i < 4 ? memory >> 8 * i : 5 + 3 * i;
    return SUCCESS;
}
static int import_memory(u64 *memory, const void *handle, int type) {
    note("import %d", type);
    if (type == FABRIC)
        for (int i = 4; i < 64; i++) if (((unsigned char *)handle)[i] != (unsigned char)(5 + 3 * i)) return INVALID_VALUE;
    *memory = dup(type == DESCRIPTOR ? (int)(u64)handle : *(const int *)handle);
    return SUCCESS;
}
static int reserve(u64 *address, size_t count, size_t alignment, u64 wanted, u64 flags) {
    note("reserve %zu %zu %lu %lu", count, alignment, wanted, flags);
    *address = (u64)mmap(NULL, count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return SUCCESS;
}
static int free_addresses(u64 address, size_t count) {
    note("free_addresses %zu", count);
    return munmap((void *)address, count) ? INVALID_VALUE : SUCCESS;
}
static int map_memory(u64 address, size_t count, size_t offset, u64 memory, u64 flags) {
    note("map %zu %zu %lu", count, offset, flags);
    void *found = mmap((void *)address, count, PROT_NONE, MAP_SHARED | MAP_FIXED, memory, offset);
    return found == (void *)address ? SUCCESS : INVALID_VALUE;
}
static int set_access(u64 address, size_t count, const Access *access, size_t devices) {
    note("access %zu: %d %d, %d, %zu", count, access->at.type, access->at.id, access->flags, devices);
    return mprotect((void *)address, count, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}
static int unmap_memory(u64 address, size_t count) {
    note("unmap %zu", count);
    return mmap((void *)address, count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ? SUCCESS : INVALID_VALUE;
}
static int get_handle(Handle *handle, u64 address) {
    for (int i = 0; i < 64; i++) handle->bytes[i] = 3 + 7 * i;
    memcpy(handle->bytes, &address, 8);
    return SUCCESS;
}
static int open_handle(u64 *address, Handle handle, unsigned flags) {
    for (int i = 8; i < 64; i++) if (handle.bytes[i] != (unsigned char)(3 + 7 * i)) return INVALID_VALUE;
    memcpy(address, handle.bytes, 8);
    note("open_handle %u", flags);
    return SUCCESS;
}
static int close_handle(u64 address) { note("close_handle"); return address ? SUCCESS : INVALID_VALUE; }
static int version(int *number) { *number = 13000; return SUCCESS; }

static const struct { const char *name; void *function; } FUNCTIONS[] = {
    {"cuCtxGetCurrent", get_current}, {"cuCtxSetCurrent", set_current}, {"cuDeviceGet", get_device},
    {"cuDevicePrimaryCtxRetain", retain}, {"cuCtxEnablePeerAccess", enable_peer}, {"cuLibraryLoadData", load},
    {"cuLibraryUnload", unload}, {"cuLibraryGetKernel", get_kernel}, {"cuKernelGetFunction", get_function},
    {"cuFuncSetAttribute", set_attribute}, {"cuLaunchKernelEx", launch_ex}, {"cuLaunchKernel", launch},
    {"cuStreamWaitValue32", wait_value}, {"cuStreamCreate", create_stream},
    {"cuThreadExchangeStreamCaptureMode", exchange_mode}, {"cuMemAlloc", allocate}, {"cuMemFree", release}, {"cuMemsetD8", set_bytes},
    {"cuMemsetD32", set_words}, {"cuMemcpyHtoD", write_to}, {"cuMemcpyAsync", copy}, {"cuMemHostAlloc", allocate_host},
    {"cuMemFreeHost", free_host}, {"cuIpcGetMemHandle", get_handle}, {"cuIpcOpenMemHandle", open_handle},
    {"cuIpcCloseMemHandle", close_handle}, {"cuDriverGetVersion", version},
    {"cuMemGetAllocationGranularity", get_granularity}, {"cuMemCreate", create_memory}, {"cuMemRelease", release_memory},
    {"cuMemExportToShareableHandle", export_memory}, {"cuMemImportFromShareableHandle", import_memory},
    {"cuMemAddressReserve", reserve}, {"cuMemAddressFree", free_addresses}, {"cuMemMap", map_memory},
    {"cuMemSetAccess", set_access}, {"cuMemUnmap", unmap_memory},
};

int cuGetProcAddress_v2(const char *symbol, void **found, int release, u64 flags, int *status) {
    *found = NULL;
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        if (!strcmp(symbol, FUNCTIONS[i].name)) *found = FUNCTIONS[i].function;
    if (!strcmp(symbol, "cuGetProcAddress")) *found = cuGetProcAddress_v2;
    if (status) *status = *found ? 0 : 1;
    return *found ? SUCCESS : 500;
}

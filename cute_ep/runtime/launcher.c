// Launches calls that are like one before but for the addresses of their tensors: `cute_ep/runtime/repeats.py`. Launches
// kernels with numbers that Python gives, and takes numbers that kernels have told the host.
//
// `Calls` knows no rule of any call. Python checks a call by what its tensors are (type, device, extents, strides, never
// their elements), and gives `Calls.add` the launch that it has made. A call of the same kind of tensors breaks no rule
// either, and its launch differs in addresses only: `Calls.launch` makes it. It declines all else by returning None, and
// Python checks that call as ever.
//
// Tensors are read by the table of functions that torch publishes for it, DLPack's exchange API, whose layout is fixed
// within a major version. The driver is called at addresses that Python gives. So this needs only Python's stable ABI.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// ---- DLPack's exchange API

enum { MAJOR_VERSION = 1, SIGNED = 0, UNSIGNED = 1 };
typedef struct { int32_t type, id; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } Element;
typedef struct {
    char *data;
    Device device;
    int32_t dims;
    Element element;
    int64_t *shape, *strides;
    uint64_t offset;
} View;
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from_object, *managed_to_object;
    int (*view_of)(void *object, View *view);  // which owns nothing; not 0: an exception is set
    void *current_stream;
} Exchange;

// ---- the driver (cuda.h)

enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
typedef struct { int id, padding, value[16]; } Attribute;
typedef struct { unsigned grid[3], block[3], shared_bytes; void *stream; Attribute *attributes; unsigned count; } Config;
typedef int (*LaunchKernel)(const Config *config, void *function, void **parameters, void **extra);
typedef int (*CurrentContext)(void **context);

// ---- what is kept of a call

enum { VECTOR_BYTES = 16, MOST_DIMS = 5, MOST_TENSORS = 16, MOST_KEYS = 10, MOST_MADE = 24, MOST_NUMBERS = 256 };
enum { MOST_PARTS = 48, MOST_SPANS = 32, BUCKETS = 256, MOST_KEPT = 512 };

enum { TENSOR = 1, ADDRESS = 2 };
typedef struct {  // what Python's rules are about; compared byte by byte
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];
    Device device;
    Element element;
    uint8_t given, gradient, inference, dims;
    uint64_t remainder;  // of the address, by VECTOR_BYTES
} Kind;

typedef struct {
    Kind kind;
    char *data;
    int64_t bytes, rows;  // to the end of its last element; the first extent of an open tensor, of whose kind it is none
} Argument;

// A number that is an address: `offset` bytes from the first of a tensor of the call, or behind these of one made. Of
// tensor -1 - i: how many rows the open tensor i has, at most `offset`.
typedef struct { int64_t tensor, number, offset; } Part;

typedef struct {
    void *function;
    unsigned shared_bytes;
    int numbers;
    uint16_t order[MOST_NUMBERS];  // the number of each parameter
} Kernel;

typedef struct Kept {
    struct Kept *next;
    int users;
    uint64_t mark;
    Kind kinds[MOST_TENSORS];
    PyObject *keys[MOST_KEYS];  // a weak reference to the first one, unless it is None
    PyObject *make, *result;
    Kernel kernel;
    unsigned grid, threads, read;  // read: bits of the tensors that the call reads
    bool pairs, early;
    int spans, made, parts;
    int64_t span[2 * MOST_SPANS];  // begins and ends of memory that no tensor may share
    int64_t extents[MOST_TENSORS];  // bytes of what is given by address
    Part part[MOST_PARTS];
    int64_t values[MOST_NUMBERS];
} Kept;

typedef struct {
    PyObject_HEAD
    const Exchange *exchange;
    PyObject *capsule, *tensor, *grad_enabled;
    LaunchKernel launch;
    CurrentContext current;
    void *context;
    const volatile uint32_t *words;
    int count, step, tensors, keys, kept;
    unsigned written, addresses, open;  // bits of the tensors that the kernel writes, that may be addresses, that are open
    Kept *buckets[BUCKETS];
} Calls;

static PyObject *REQUIRES_GRAD, *IS_INFERENCE;

static void release(Kept *kept) {
    if (--kept->users) return;
    for (int i = 0; i < MOST_KEYS; i++) Py_XDECREF(kept->keys[i]);
    Py_XDECREF(kept->make);
    Py_XDECREF(kept->result);
    PyMem_Free(kept);
}

static int Calls_clear(PyObject *object) {
    Calls *self = (Calls *)object;
    self->kept = 0;
    for (int i = 0; i < BUCKETS; i++)
        for (Kept *kept; (kept = self->buckets[i]);) {
            self->buckets[i] = kept->next;
            release(kept);
        }
    return 0;
}

// ---- reading a call

static bool is_false(PyObject *flag) {
    bool found = flag == Py_False;
    Py_XDECREF(flag);
    if (!flag) PyErr_Clear();
    return found;
}

// What an argument is. False: it is declined.
static bool look(const Calls *self, PyObject *object, int place, Argument *into) {
    memset(into, 0, sizeof *into);
    if (object == Py_None) return true;
    if (self->addresses >> place & 1 && PyLong_Check(object)) {  // of memory that Python need not check
        into->data = PyLong_AsVoidPtr(object);
        into->kind.given = ADDRESS;
        bool fits = !PyErr_Occurred();
        PyErr_Clear();
        return fits;
    }
    if ((PyObject *)Py_TYPE(object) != self->tensor) return false;
    View view;
    if (self->exchange->view_of(object, &view)) {
        PyErr_Clear();
        return false;
    }
    if (!view.data || !view.shape || !view.strides || view.dims > MOST_DIMS) return false;
    Kind *kind = &into->kind;
    bool integers = view.element.code == SIGNED || view.element.code == UNSIGNED;  // which require no gradient
    kind->gradient = !integers && !is_false(PyObject_GetAttr(object, REQUIRES_GRAD));
    if (kind->gradient && !is_false(PyObject_CallObject(self->grad_enabled, NULL))) return false;
    kind->inference = (self->written >> place & 1) && !is_false(PyObject_CallMethodObjArgs(object, IS_INFERENCE, NULL));
    into->data = view.data + view.offset;
    kind->given = TENSOR;
    kind->dims = (uint8_t)view.dims;
    kind->remainder = (uintptr_t)into->data % VECTOR_BYTES;
    kind->element = view.element;
    kind->device = view.device;
    int64_t last = 0;
    for (int i = 0; i < view.dims; i++) {
        kind->shape[i] = view.shape[i];
        kind->strides[i] = view.strides[i];
        if (view.shape[i] < 1 || view.strides[i] < 0) return false;
        last += (view.shape[i] - 1) * view.strides[i];
    }
    into->bytes = (last + 1) * view.element.bits * view.element.lanes / 8;
    if (self->open >> place & 1) {  // its stride would be of a kind that says nothing of it where there is one row
        int64_t inner = 1;
        for (int i = view.dims; i--; inner *= view.shape[i])
            if (view.strides[i] != inner) return false;
        into->rows = kind->shape[0];
        kind->shape[0] = 0;
    }
    return true;
}

static bool look_at_all(const Calls *self, PyObject *const *tensors, Argument *into) {
    for (int i = 0; i < self->tensors; i++)
        if (!look(self, tensors[i], i, into + i)) return false;
    return true;
}

static uint64_t mark_of(const Calls *self, const Argument *arguments, PyObject *const *keys) {
    uint64_t mark = 0;
    for (int i = 0; i < self->tensors; i++) mark = (mark + (uint64_t)arguments[i].kind.shape[0]) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < self->keys; i++) mark = (mark ^ (uintptr_t)keys[i] >> 4) * 0x9E3779B97F4A7C15u;
    return mark ^ mark >> 32;
}

static bool same(const Calls *self, const Kept *kept, const Argument *arguments, PyObject *const *keys) {
    for (int i = 1; i < self->keys; i++)
        if (kept->keys[i] != keys[i]) return false;
    if (kept->keys[0] == Py_None || keys[0] == Py_None) {
        if (kept->keys[0] != keys[0]) return false;
    } else if (PyWeakref_GetObject(kept->keys[0]) != keys[0]) return false;  // None once it is gone
    for (int i = 0; i < self->tensors; i++)
        if (memcmp(kept->kinds + i, &arguments[i].kind, sizeof(Kind))) return false;
    return true;
}

static bool share(const Argument *one, const Argument *other) {
    return one->data < other->data + other->bytes && other->data < one->data + one->bytes;
}

// Whether all that is written is apart from all that is read. Some calls may share memory: Python knows which.
static bool all_apart(const Calls *self, const Kept *kept, const Argument *arguments) {
    for (int i = 0; i < self->tensors; i++) {
        const Argument *one = arguments + i;
        if (!one->kind.given || !(kept->read >> i & 1)) continue;
        for (int k = 0; k < kept->spans; k++) {
            char *begin = (char *)kept->span[2 * k];
            const Argument span = {.data = begin, .bytes = (char *)kept->span[2 * k + 1] - begin};
            if (share(one, &span)) return false;
        }
        for (int k = 0; k < self->tensors; k++)
            if (self->written >> k & 1 && k != i && arguments[k].kind.given && share(one, arguments + k)) return false;
    }
    return true;
}

// ---- launching

// The driver's status. `values` must stay until this returns: other threads run meanwhile.
static int enqueue(LaunchKernel launch, const Kernel *kernel, unsigned grid, unsigned threads, void *stream, bool pairs,
                   bool early, int64_t *values) {
    void *parameters[MOST_NUMBERS];
    for (int i = 0; i < kernel->numbers; i++) parameters[i] = values + kernel->order[i];
    Attribute attributes[2] = {{.id = CLUSTER_DIMENSION, .value = {2, 1, 1}}};
    attributes[pairs] = (Attribute){.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value = {1}};
    const Config config = {
        .grid = {grid, 1, 1},
        .block = {threads, 1, 1},
        .shared_bytes = kernel->shared_bytes,
        .stream = stream,
        .attributes = attributes,
        .count = pairs + early,
    };
    int status;
    Py_BEGIN_ALLOW_THREADS  // a full queue blocks until other threads have launched what it waits for
    status = launch(&config, kernel->function, parameters, NULL);
    Py_END_ALLOW_THREADS
    return status;
}

// Fills all but the number of numbers. False: the order is not of each of these.
static bool describe(Kernel *kernel, unsigned long long function, const char *order, Py_ssize_t order_bytes) {
    kernel->function = (void *)(uintptr_t)function;
    if (order_bytes != (Py_ssize_t)(kernel->numbers * sizeof *kernel->order)) return false;
    memcpy(kernel->order, order, order_bytes);
    for (int i = 0; i < kernel->numbers; i++)
        if (kernel->order[i] >= kernel->numbers) return false;
    return true;
}

// What `make` returns, and where it lies.
static PyObject *make_outputs(const Calls *self, const Kept *kept, char **made) {
    PyObject *pair = PyObject_CallObject(kept->make, NULL), *tensors = pair ? PyTuple_GetItem(pair, 1) : NULL;
    if (tensors && PyTuple_Size(tensors) != kept->made && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "make: must return as many tensors as `add` was told");
    for (int i = 0; i < kept->made && !PyErr_Occurred(); i++) {
        View view;
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        made[i] = NULL;
        if (tensor != Py_None && !self->exchange->view_of(tensor, &view)) made[i] = view.data + view.offset;
    }
    if (PyErr_Occurred()) Py_CLEAR(pair);
    return pair;
}

static PyObject *launch(const Calls *self, const Kept *kept, const Argument *arguments, void *stream, bool early) {
    int64_t values[MOST_NUMBERS];
    char *made[MOST_MADE];
    memcpy(values, kept->values, kept->kernel.numbers * sizeof *values);
    PyObject *pair = NULL, *result = NULL;
    if (kept->make != Py_None && !(pair = make_outputs(self, kept, made))) return NULL;
    for (const Part *part = kept->part; part < kept->part + kept->parts; part++) {
        if (part->tensor < 0) {
            const int64_t rows = arguments[-1 - part->tensor].rows;
            values[part->number] = rows < part->offset ? rows : part->offset;
            continue;
        }
        const bool given = part->tensor < self->tensors;
        char *data = given ? arguments[part->tensor].data : made[part->tensor - self->tensors];
        if (data) values[part->number] = (int64_t)(data + part->offset);
    }
    if (enqueue(self->launch, &kept->kernel, kept->grid, kept->threads, stream, kept->pairs, kept->early && early,
                values))
        result = Py_NewRef(Py_None);  // Python will be told why, too
    else result = PyTuple_Pack(2, kept->result, pair ? PyTuple_GetItem(pair, 0) : Py_None);
    Py_XDECREF(pair);
    return result;
}

PyDoc_STRVAR(launch_doc, "launch(stream, early, *tensors, *keys)\n--\n\n"
"Launch what `add` was given for such tensors and keys. Returns (its `result`, the first of what `make` returned or\n"
"None); None: nothing was launched.");
static PyObject *Calls_launch(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Calls *self = (Calls *)object;
    if (count != 2 + self->tensors + self->keys) {
        PyErr_SetString(PyExc_TypeError, "launch: must be given a stream, early, and all tensors and keys");
        return NULL;
    }
    void *stream = PyLong_AsVoidPtr(given[0]), *context = NULL;
    if (PyErr_Occurred()) return NULL;
    for (int i = 0; i < self->count; i += self->step)
        if (self->words[i]) Py_RETURN_NONE;
    if (self->current(&context) || context != self->context) Py_RETURN_NONE;
    PyObject *const *keys = given + 2 + self->tensors;
    Argument arguments[MOST_TENSORS];
    if (!look_at_all(self, given + 2, arguments)) Py_RETURN_NONE;
    uint64_t mark = mark_of(self, arguments, keys);
    Kept *kept = self->buckets[mark % BUCKETS];
    while (kept && !(kept->mark == mark && same(self, kept, arguments, keys))) kept = kept->next;
    for (int i = 0; kept && i < self->tensors; i++)
        if (arguments[i].kind.given == ADDRESS) arguments[i].bytes = kept->extents[i];
    if (!kept || !all_apart(self, kept, arguments)) Py_RETURN_NONE;
    kept->users++;  // another thread may have it forgotten
    PyObject *result = launch(self, kept, arguments, stream, given[1] == Py_True);
    release(kept);
    return result;
}

// ---- keeping a call

// Whether these are whole int64s, as many groups of so many as are stored, at most `most`.
static bool int64s(int64_t *into, int *groups, const char *bytes, Py_ssize_t count, int each, int most) {
    *groups = (int)(count / (each * (Py_ssize_t)sizeof *into));
    if (count % (each * (Py_ssize_t)sizeof *into) || count > most * each * (Py_ssize_t)sizeof *into) return false;
    memcpy(into, bytes, count);
    return true;
}

// Whether all parts are numbers of the kernel, and of tensors of the call or made.
static bool has_parts(const Calls *self, const Kept *kept) {
    for (int i = 0; i < kept->parts; i++) {
        const Part *part = kept->part + i;
        if (part->number < 0 || part->number >= kept->kernel.numbers) return false;
        if (part->tensor >= self->tensors + kept->made || part->tensor < -self->tensors) return false;
        if (part->tensor < 0 && !(self->open >> (-1 - part->tensor) & 1)) return false;
    }
    return kept->made >= 0 && kept->made <= MOST_MADE;
}

PyDoc_STRVAR(add_doc, "add(tensors, keys, parts, read, extents, kernel, grid, pairs, early, spans, make, made, result)\n--\n\n"
"Keep a launch for calls of such tensors and the same keys. Returns whether it can be kept.\n\n"
"tensors, keys: tuples. keys are compared by identity; the first is None or is kept by a weak reference.\n"
"parts: (tensor, number, offset) as int64: a number of the launch that is the address of so many bytes into a tensor,\n"
"behind those of the call of one that `make` makes; of tensor -1 - i how many rows the open one has, at most `offset`.\n"
"read: bits of the tensors that the call reads.\n"
"extents: of each tensor, as int64, its bytes where it is given by address.\n"
"kernel: (function, threads of a CTA, dynamic shared memory, the numbers as int64, of each parameter its number as\n"
"uint16).\n"
"pairs, early: in clusters of 2; whether the launch may start before the one before has ended.\n"
"spans: begins and ends, as int64, of memory that the kernel writes besides.\n"
"make: None, or a function of no arguments that makes what the kernel writes and returns (what the caller gets, a\n"
"tuple of tensors or None); made: how many these are.");
static PyObject *Calls_add(PyObject *object, PyObject *args) {
    Calls *self = (Calls *)object;
    PyObject *tensors, *keys, *make, *result;
    unsigned long long function;
    unsigned grid, threads, read;
    Kernel kernel = {0};
    const char *values, *order, *spans, *parts, *extents;
    Py_ssize_t value_bytes, order_bytes, span_bytes, part_bytes, extent_bytes;
    int pairs, early, made, sized;
    if (!PyArg_ParseTuple(args, "O!O!y#Iy#(KIIy#y#)Ippy#OiO", &PyTuple_Type, &tensors, &PyTuple_Type, &keys, &parts,
                          &part_bytes, &read, &extents, &extent_bytes, &function, &threads, &kernel.shared_bytes,
                          &values, &value_bytes, &order, &order_bytes, &grid, &pairs, &early, &spans, &span_bytes,
                          &make, &made, &result))
        return NULL;
    PyObject *each[MOST_TENSORS], *same_as[MOST_KEYS];
    if (PyTuple_Size(tensors) != self->tensors || PyTuple_Size(keys) != self->keys) {
        PyErr_SetString(PyExc_TypeError, "add: must be given as many tensors and keys as `launch`");
        return NULL;
    }
    for (int i = 0; i < self->tensors; i++) each[i] = PyTuple_GetItem(tensors, i);
    for (int i = 0; i < self->keys; i++) same_as[i] = PyTuple_GetItem(keys, i);
    Argument arguments[MOST_TENSORS];
    if (!look_at_all(self, each, arguments)) Py_RETURN_FALSE;
    Kept *kept = PyMem_Calloc(1, sizeof *kept);
    if (!kept) return PyErr_NoMemory();
    kept->users = 1;
    bool fits = int64s(kept->values, &kernel.numbers, values, value_bytes, 1, MOST_NUMBERS) &&
                int64s(kept->span, &kept->spans, spans, span_bytes, 2, MOST_SPANS) &&
                int64s((int64_t *)kept->part, &kept->parts, parts, part_bytes, 3, MOST_PARTS) &&
                int64s(kept->extents, &sized, extents, extent_bytes, self->tensors, 1) &&
                order_bytes == (Py_ssize_t)(kernel.numbers * sizeof *kernel.order);
    if (!fits) {
        release(kept);
        Py_RETURN_FALSE;
    }
    for (int i = 0; i < self->tensors; i++) kept->kinds[i] = arguments[i].kind;
    for (int i = 0; i < self->keys; i++)
        if (!(kept->keys[i] = i || same_as[i] == Py_None ? Py_NewRef(same_as[i]) : PyWeakref_NewRef(same_as[i], NULL))) break;
    kept->make = Py_NewRef(make);
    kept->result = Py_NewRef(result);
    bool ordered = describe(&kernel, function, order, order_bytes);
    kept->kernel = kernel;
    kept->made = made;
    kept->read = read;
    kept->grid = grid;
    kept->threads = threads;
    kept->pairs = pairs;
    kept->early = early;
    if (PyErr_Occurred() || !sized || !ordered || !has_parts(self, kept)) {
        release(kept);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "add: parts must be of tensors and numbers that there are");
        return NULL;
    }
    if (self->kept >= MOST_KEPT) Calls_clear(object);
    kept->mark = mark_of(self, arguments, same_as);
    kept->next = self->buckets[kept->mark % BUCKETS];
    self->buckets[kept->mark % BUCKETS] = kept;
    self->kept++;
    Py_RETURN_TRUE;
}

// ---- the type

static int Calls_traverse(PyObject *object, visitproc visit, void *arg) {
    Calls *self = (Calls *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->tensor);
    for (int i = 0; i < BUCKETS; i++)
        for (Kept *kept = self->buckets[i]; kept; kept = kept->next) {
            for (int k = 0; k < self->keys; k++) Py_VISIT(kept->keys[k]);
            Py_VISIT(kept->make);
            Py_VISIT(kept->result);
        }
    return 0;
}

static void Calls_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Calls_clear(object);
    Py_XDECREF(((Calls *)object)->tensor);
    Py_XDECREF(((Calls *)object)->capsule);
    Py_XDECREF(((Calls *)object)->grad_enabled);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *Calls_new(PyTypeObject *type, PyObject *args, PyObject *words) {
    PyObject *capsule, *tensor, *grad_enabled;
    unsigned long long launch, current, context, reported;
    int count, step, tensors, keys;
    unsigned written, addresses, open;
    if (!PyArg_ParseTuple(args, "OOO(KKK)(Kii)iIiII", &capsule, &tensor, &grad_enabled, &launch, &current, &context,
                          &reported, &count, &step, &tensors, &written, &keys, &addresses, &open))
        return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange) return NULL;
    bool fits = tensors > 0 && tensors <= MOST_TENSORS && keys > 0 && keys <= MOST_KEYS && step > 0;
    if (exchange->major != MAJOR_VERSION || !exchange->view_of || !fits) {
        PyErr_SetString(PyExc_ValueError, fits ? "exchange: must be DLPack 1" : "Calls: too many tensors or keys");
        return NULL;
    }
    Calls *self = (Calls *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->exchange = exchange;
    self->capsule = Py_NewRef(capsule);
    self->tensor = Py_NewRef(tensor);
    self->grad_enabled = Py_NewRef(grad_enabled);
    self->launch = (LaunchKernel)(uintptr_t)launch;
    self->current = (CurrentContext)(uintptr_t)current;
    self->context = (void *)(uintptr_t)context;
    self->words = (const uint32_t *)(uintptr_t)reported;
    self->count = count;
    self->step = step;
    self->tensors = tensors;
    self->written = written;
    self->addresses = addresses;
    self->open = open;
    self->keys = keys;
    return (PyObject *)self;
}

PyDoc_STRVAR(calls_doc, "Calls(exchange, tensor, grad_enabled, driver, reports, tensors, written, keys, addresses, open)\n--\n\n"
"Launches that are kept, of one operation of one rank.\n\n"
"exchange, tensor, grad_enabled: torch's capsule of DLPack's exchange API, its class of tensors, is_grad_enabled.\n"
"driver: addresses of cuLaunchKernelEx and cuCtxGetCurrent, and the context that must be current.\n"
"reports: (address, count, step): every step-th of so many words must be 0.\n"
"tensors, keys: how many a call has; written: bits of the tensors that the kernel writes.\n"
"addresses: bits of those that may be addresses instead, of memory that need not be checked.\n"
"open: bits of those in whose first extent calls of a kind may differ.");
static PyMethodDef METHODS[] = {
    {"launch", (PyCFunction)(void (*)(void))Calls_launch, METH_FASTCALL, launch_doc},
    {"add", Calls_add, METH_VARARGS, add_doc},
    {0},
};
static PyType_Slot SLOTS[] = {
    {Py_tp_doc, (void *)calls_doc}, {Py_tp_new, Calls_new},      {Py_tp_dealloc, Calls_dealloc},
    {Py_tp_traverse, Calls_traverse}, {Py_tp_clear, Calls_clear}, {Py_tp_methods, METHODS}, {0},
};
static PyType_Spec SPEC = {"cute_ep.runtime._launcher.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, SLOTS};

// ---- kernels that Python gives the numbers of

typedef struct {
    PyObject_HEAD
    LaunchKernel launch;
    Kernel kernel;
    Py_buffer values;
} Function;

// Appends the numbers of a tuple or list, and of those in it.
static bool flatten(PyObject *given, int64_t *into, int *count, int most) {
    bool tuple = PyTuple_Check(given);
    if (!tuple && !PyList_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "start: numbers must be in tuples or lists");
        return false;
    }
    Py_ssize_t size = tuple ? PyTuple_Size(given) : PyList_Size(given);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *one = tuple ? PyTuple_GetItem(given, i) : PyList_GetItem(given, i);
        if (!PyLong_Check(one)) {
            if (!flatten(one, into, count, most)) return false;
            continue;
        }
        if (*count == most) {
            PyErr_Format(PyExc_ValueError, "start: the kernel has no more than %d numbers", most);
            return false;
        }
        into[(*count)++] = PyLong_AsLongLong(one);
        if (PyErr_Occurred()) return false;
    }
    return true;
}

PyDoc_STRVAR(start_doc, "start(grid, threads, stream, early, pairs, given)\n--\n\n"
"Launch the kernel; the numbers of `given`, a tuple or list of these and of numbers, take the place of the first that it\n"
"has. Returns the driver's status, 0: it was launched. The numbers stay.");
static PyObject *Function_start(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Function *self = (Function *)object;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "start: must be given grid, threads, stream, early, pairs and numbers");
        return NULL;
    }
    unsigned long grid = PyLong_AsUnsignedLong(args[0]), threads = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    void *stream = PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred()) return NULL;
    int64_t values[MOST_NUMBERS];
    int given = 0;
    if (!flatten(args[5], values, &given, self->kernel.numbers)) return NULL;
    memcpy(self->values.buf, values, given * sizeof *values);
    memcpy(values, self->values.buf, self->kernel.numbers * sizeof *values);
    bool early = args[3] == Py_True, pairs = args[4] == Py_True;
    return PyLong_FromLong(
        enqueue(self->launch, &self->kernel, (unsigned)grid, (unsigned)threads, stream, pairs, early, values));
}

static PyObject *Function_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    unsigned long long launch, function;
    Kernel kernel = {0};
    PyObject *values;
    const char *order;
    Py_ssize_t order_bytes;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "KKIOy#", &launch, &function, &kernel.shared_bytes, &values, &order, &order_bytes) ||
        PyObject_GetBuffer(values, &view, PyBUF_WRITABLE))
        return NULL;
    kernel.numbers = view.len <= MOST_NUMBERS * (Py_ssize_t)sizeof(int64_t) ? (int)(view.len / sizeof(int64_t)) : -1;
    bool fits = view.len % sizeof(int64_t) == 0 && kernel.numbers >= 0;
    if (!fits || !describe(&kernel, function, order, order_bytes)) {
        PyBuffer_Release(&view);
        PyErr_Format(PyExc_ValueError, "Function: must have at most %d numbers, as many as parameters", MOST_NUMBERS);
        return NULL;
    }
    Function *self = (Function *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        PyBuffer_Release(&view);
        return NULL;
    }
    self->launch = (LaunchKernel)(uintptr_t)launch;
    self->kernel = kernel;
    self->values = view;
    return (PyObject *)self;
}

static void Function_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&((Function *)object)->values);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(function_doc, "Function(launch, function, shared_bytes, values, order)\n--\n\n"
"A kernel to be launched by cuLaunchKernelEx, at address `launch`, from one thread at a time or several.\n\n"
"values: its numbers, a writable buffer of int64; order: of each parameter its number as uint16.");
static PyMethodDef FUNCTION_METHODS[] = {
    {"start", (PyCFunction)(void (*)(void))Function_start, METH_FASTCALL, start_doc},
    {0},
};
static PyType_Slot FUNCTION_SLOTS[] = {
    {Py_tp_doc, (void *)function_doc}, {Py_tp_new, Function_new}, {Py_tp_dealloc, Function_dealloc},
    {Py_tp_methods, FUNCTION_METHODS}, {0},
};
static PyType_Spec FUNCTION_SPEC = {"cute_ep.runtime._launcher.Function", sizeof(Function), 0, Py_TPFLAGS_DEFAULT, FUNCTION_SLOTS};

// ---- what kernels tell the host

PyDoc_STRVAR(take_doc, "take(address, count, epoch)\n--\n\n"
"The values of so many LL words of host memory, or None unless all are of the epoch.");
static PyObject *take(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "take: must be given address, count and epoch");
        return NULL;
    }
    const volatile uint64_t *words = PyLong_AsVoidPtr(args[0]);
    if (PyErr_Occurred()) return NULL;
    size_t count = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    unsigned long long epoch = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    for (size_t i = count; i--;)  // the last word is as a rule among the last to come
        if (words[i] >> 32 != epoch) Py_RETURN_NONE;
    PyObject *found = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; found && i < count; i++) {
        uint64_t word = words[i];
        PyObject *value = word >> 32 == epoch ? PyLong_FromUnsignedLong((uint32_t)word) : NULL;
        if (value) PyList_SetItem(found, (Py_ssize_t)i, value);
        else Py_CLEAR(found);
    }
    if (!found && !PyErr_Occurred()) Py_RETURN_NONE;  // a later record has begun to take its place
    return found;
}

// ---- the module

static PyMethodDef FUNCTIONS[] = {{"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, take_doc}, {0}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_launcher", "Launches, and what they tell.", -1, FUNCTIONS};

static bool add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    bool added = type && !PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return added;
}

PyMODINIT_FUNC PyInit__launcher(void) {
    PyObject *module = PyModule_Create(&MODULE);
    REQUIRES_GRAD = PyUnicode_InternFromString("requires_grad");
    IS_INFERENCE = PyUnicode_InternFromString("is_inference");
    bool made = module && REQUIRES_GRAD && IS_INFERENCE;
    if (!made || !add_type(module, "Calls", &SPEC) || !add_type(module, "Function", &FUNCTION_SPEC)) Py_CLEAR(module);
    return module;
}

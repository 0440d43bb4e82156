/* A Python interpreter that is kept started: packaging/snapshot/build.sh makes it, take.py says what it loads.
 *
 * Run as  snapshot TAKE.PY FILE SEED PYTHON LIBRARY WORD...  a new interpreter executes TAKE.PY, which finds the words
 * in sys.words, and writes its memory to FILE; assemble.py puts that into the program's own file.  SEED: of its hashes.
 * LIBRARY: its standard library.  The program made so is called like PYTHON, the interpreter it stands for:
 *
 *     PYTHON -I -S -c CODE PROGRAM WORD...
 *
 * It calls the function that take.py has prepared for CODE.  Without one for this CODE, or under a locale that is not
 * UTF-8, it executes PYTHON with the same words, before it has done anything else.
 *
 * What is kept is Python's own data (.python) and heap (.python_heap): snapshot.ld gives both fixed addresses.  The C
 * library's data is not kept.  So it starts as in every program: its random canary, vDSO, environment, standard streams
 * and locks are those of this process. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>

PyMODINIT_FUNC PyInit__prctl(void);
extern char python_data_begin[], python_data_end[], python_heap_begin[], python_heap_end[]; /* snapshot.ld */
static char *heap_top = python_heap_begin, *heap_end = python_heap_end;

static struct kept {
	int taken;
	PyThreadState *thread;
	pthread_key_t key; /* of PyGILState_Ensure: by it the thread finds its state */
	PyObject *start; /* called with the arguments and the environment; returns the exit status */
	char *python; /* the ordinary interpreter */
} kept;

/* Memory: all of malloc's is from .python_heap, before the snapshot is taken and after it (the linker's --wrap leads the
 * calls here), except what has no room there.  Each block has its size in front; blocks that were given back are taken
 * again, by their class. */
enum { ALIGNMENT = 16, ROOM = 8 << 20 }; /* ROOM: bytes for what a start adds to the heap; beyond it the C library's */
static void *free_blocks[1 << 10];
static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;
static void lock_heap(void) { pthread_mutex_lock(&heap_lock); }
static void unlock_heap(void) { pthread_mutex_unlock(&heap_lock); }

static int is_ours(const void *block)
{
	return (char *)block >= python_heap_begin && (char *)block < python_heap_end;
}

/* Round a size up to one of eight between two powers of two, and return the number of its class: the same for a size that
 * is rounded already. */
static unsigned find_class(size_t *size)
{
	unsigned bits = *size < 1 << 7 ? 7 : 63 - (unsigned)__builtin_clzl(*size), shift = bits - 3;
	*size = (*size + (1ul << shift) - !!*size) >> shift << shift;
	if (*size >> shift == 16) /* the next power of two */
		shift++;
	return shift << 4 | (unsigned)(*size >> shift);
}

static void *take_block(size_t size)
{
	char *block = (char *)(((uintptr_t)heap_top + 2 * ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
	if (block > heap_end || size > (size_t)(heap_end - block))
		return NULL;
	heap_top = block + size;
	((size_t *)block)[-1] = size;
	return block;
}

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
	size_t rounded = size;
	if (size > (size_t)(python_heap_end - python_heap_begin))
		return __real_malloc(size);
	unsigned class = find_class(&rounded);
	lock_heap();
	void **block = free_blocks[class];
	if (block)
		free_blocks[class] = *block;
	else
		block = take_block(rounded);
	unlock_heap();
	return block ? block : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
	size_t bytes;
	void *block = __builtin_mul_overflow(count, size, &bytes) ? NULL : __wrap_malloc(bytes);
	return block ? memset(block, 0, bytes) : NULL;
}

void __real_free(void *block);
void __wrap_free(void *block)
{
	if (!is_ours(block)) {
		__real_free(block);
		return;
	}
	size_t size = ((size_t *)block)[-1];
	unsigned class = find_class(&size);
	if (!kept.taken)
		memset(block, 0, size); /* no address of the past stays in it */
	lock_heap();
	*(void **)block = free_blocks[class];
	free_blocks[class] = block;
	unlock_heap();
}

void *__real_realloc(void *block, size_t size);
void *__wrap_realloc(void *block, size_t size)
{
	if (!block)
		return __wrap_malloc(size);
	if (!is_ours(block))
		return __real_realloc(block, size);
	size_t had = ((size_t *)block)[-1];
	if (size <= had)
		return block;
	void *moved = __wrap_malloc(size);
	if (moved) {
		memcpy(moved, block, had);
		__wrap_free(block);
	}
	return moved;
}

/* What Python takes in large pieces: the stack of its frames. */
static void *arena_alloc(void *context, size_t size)
{
	(void)context;
	return __wrap_malloc(size);
}

static void arena_free(void *context, void *arena, size_t size)
{
	(void)context, (void)size;
	__wrap_free(arena);
}

/* The module _syscall: system calls without ctypes, for ocigpu/system/foreign.py. */
static PyObject *call(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	(void)self;
	long values[7] = {0};
	Py_buffer views[7];
	int viewed = 0;
	if (count < 1 || count > 7)
		return PyErr_Format(PyExc_TypeError, "call() takes a number and at most 6 arguments");
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *argument = arguments[i];
		if (PyLong_Check(argument))
			values[i] = (long)PyLong_AsUnsignedLongMask(argument);
		else if (argument != Py_None && !PyObject_GetBuffer(argument, &views[viewed], PyBUF_SIMPLE))
			values[i] = (long)views[viewed++].buf;
		if (PyErr_Occurred())
			break;
	}
	long result = -1;
	if (!PyErr_Occurred()) {
		Py_BEGIN_ALLOW_THREADS
		result = syscall(values[0], values[1], values[2], values[3], values[4], values[5], values[6]);
		Py_END_ALLOW_THREADS
		if (result == -1)
			PyErr_SetFromErrno(PyExc_OSError);
	}
	while (viewed)
		PyBuffer_Release(&views[--viewed]);
	return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

static PyObject *address(PyObject *self, PyObject *buffer)
{
	(void)self;
	Py_buffer view;
	if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE))
		return NULL;
	PyObject *found = PyLong_FromVoidPtr(view.buf);
	PyBuffer_Release(&view);
	return found;
}

/* Objects whose count of references changes no more (PEP 683): the memory that they are in is not written at a start. */
struct visited { PyObject **objects; size_t count, room; };

static int visit(PyObject *object, void *visited)
{
	struct visited *all = visited;
	if (!object || _Py_IsImmortal(object))
		return 0;
	if (all->count == all->room) {
		PyObject **more = PyMem_Realloc(all->objects, (all->room += all->room + 4096) * sizeof *more);
		if (!more)
			return -1;
		all->objects = more;
	}
	object->ob_refcnt = _Py_IMMORTAL_REFCNT;
	all->objects[all->count++] = object;
	return 0;
}

/* Make immortal what is in a list, and all that this refers to; the list itself is not. */
static PyObject *make_immortal(PyObject *self, PyObject *list)
{
	(void)self;
	struct visited all = {0};
	for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
		visit(PyList_GET_ITEM(list, i), &all);
	for (size_t i = 0; i < all.count; i++) {
		PyObject *object = all.objects[i];
		if (PyCode_Check(object)) { /* not of the garbage collector's kind */
			PyCodeObject *code = (PyCodeObject *)object;
			PyObject *parts[] = {code->co_consts, code->co_names, code->co_exceptiontable, code->co_localsplusnames,
				code->co_localspluskinds, code->co_filename, code->co_name, code->co_qualname, code->co_linetable};
			for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
				visit(parts[part], &all);
		} else if (Py_TYPE(object)->tp_traverse && Py_TYPE(object) != &PyFrame_Type)
			Py_TYPE(object)->tp_traverse(object, visit, &all);
	}
	PyMem_Free(all.objects);
	Py_RETURN_NONE;
}

static PyObject *set_start(PyObject *self, PyObject *start)
{
	(void)self;
	kept.start = Py_NewRef(start);
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL},
	{"address", address, METH_O, NULL},
	{"make_immortal", make_immortal, METH_O, NULL}, /* for take.py, as the next */
	{"set_start", set_start, METH_O, NULL},
	{NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_syscall", NULL, 0, methods};
static PyObject *init_syscall(void) { return PyModuleDef_Init(&definition); }

/* The C library's texts for errors, as the ordinary interpreter has them: build.sh writes the list. */
const char *__real_strerror(int number);
const char *__wrap_strerror(int number)
{
	static const char *const texts[] = {
#include "errors.h"
	};
	const char *text = number >= 0 && (size_t)number < sizeof texts / sizeof *texts ? texts[number] : NULL;
	return text ? text : __real_strerror(number);
}

static void check(PyStatus status)
{
	if (PyStatus_Exception(status))
		Py_ExitStatusException(status);
}

static int write_all(int file, const char *begin, const char *end)
{
	while (begin < end) {
		ssize_t written = write(file, begin, (size_t)(end - begin));
		if (written < 0)
			return -1;
		begin += written;
	}
	return 0;
}

/* Execute a script in a new interpreter, and write the memory that is to be kept: size of data, size of heap, size it may have,
 * both contents. */
static int take(char **words)
{
	PyObjectArenaAllocator arenas = {NULL, arena_alloc, arena_free};
	PyObject_SetArenaAllocator(&arenas);
	PyPreConfig before;
	PyPreConfig_InitIsolatedConfig(&before);
	before.utf8_mode = 1;
	before.allocator = PYMEM_ALLOCATOR_MALLOC; /* ours, which clears what is given back; pymalloc leaves it */
	check(Py_PreInitialize(&before));
	PyImport_AppendInittab("_syscall", init_syscall);
	PyImport_AppendInittab("_prctl", PyInit__prctl);
	PyConfig config;
	PyConfig_InitIsolatedConfig(&config);
	config.site_import = config.pathconfig_warnings = config.parse_argv = config.write_bytecode = 0;
	config.buffered_stdio = 1;
	config.use_hash_seed = 1;
	config.hash_seed = strtoul(words[3], NULL, 10);
	config.module_search_paths_set = 1;
	check(PyConfig_SetBytesString(&config, &config.executable, words[4]));
	check(PyConfig_SetBytesString(&config, &config.home, "/"));
	kept.python = strdup(words[4]);
	wchar_t *library = Py_DecodeLocale(words[5], NULL);
	check(PyWideStringList_Append(&config.module_search_paths, library));
	check(Py_InitializeFromConfig(&config));
	PyConfig_Clear(&config);
	PyObject *list = PyList_New(0);
	for (char **word = words + 6; *word; word++)
		PyList_Append(list, PyUnicode_FromString(*word));
	PySys_SetObject("words", list);
	FILE *script = fopen(words[1], "r");
	if (!script || PyRun_SimpleFileExFlags(script, "take.py", 1, NULL) || !kept.start)
		return 1;
	PyMem_RawFree(library);
	while (pthread_getspecific(kept.key) != PyThreadState_Get())
		kept.key++;
	PyOS_BeforeFork();
	kept.thread = PyEval_SaveThread();
	kept.taken = 1;
	/* Of this process, and for nobody: its number, and the frames of functions that have returned. */
	kept.thread->native_thread_id = 0;
	kept.thread->c_recursion_remaining = 1000; /* calls of C, as before Python 3.12: a small stack is enough for them */
	memset(kept.thread->datastack_top, 0, (size_t)((char *)kept.thread->datastack_limit - (char *)kept.thread->datastack_top));
	memset(free_blocks, 0, sizeof free_blocks); /* a start takes new memory, not what is left between objects: fewer pages */
	size_t used = (size_t)(heap_top - python_heap_begin);
	size_t sizes[3] = {(size_t)(python_data_end - python_data_begin), used, used + ROOM};
	heap_end = heap_top + ROOM;
	int file = open(words[2], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	return file < 0 || write_all(file, (char *)sizes, (char *)(sizes + 3)) ||
		write_all(file, python_data_begin, python_data_end) || write_all(file, python_heap_begin, heap_top);
}

/* Whether names of files are UTF-8, as the ordinary interpreter takes them: it is so under the locale C too. */
static int is_utf8(void)
{
	const char *locale = getenv("LC_ALL");
	if (!locale || !*locale)
		locale = getenv("LC_CTYPE");
	if (!locale || !*locale)
		locale = getenv("LANG");
	return !locale || !*locale || !strcmp(locale, "C") || !strcmp(locale, "POSIX") || strcasestr(locale, "utf-8") ||
		strcasestr(locale, "utf8");
}

static PyObject *list_of(char **texts)
{
	PyObject *list = PyList_New(0);
	for (; list && *texts; texts++) {
		PyObject *text = PyBytes_FromString(*texts);
		if (!text || PyList_Append(list, text))
			return NULL;
		Py_DECREF(text);
	}
	return list;
}

int main(int count, char **words)
{
	if (!kept.taken)
		return count < 6 ? 2 : take(words);
	if (count < 6 || !is_utf8())
		goto ordinary;
	pthread_atfork(lock_heap, unlock_heap, unlock_heap); /* another thread may be in malloc */
	signal(SIGPIPE, SIG_IGN); /* as Py_Initialize does */
	signal(SIGXFSZ, SIG_IGN);
	pthread_key_t key;
	do
		if (pthread_key_create(&key, NULL))
			goto ordinary;
	while (key != kept.key);
	pthread_setspecific(key, kept.thread);
	kept.thread->thread_id = PyThread_get_thread_ident();
	PyEval_RestoreThread(kept.thread);
	PyOS_AfterFork_Child(); /* this process has other threads: its locks, keys and numbers are made anew */
	PyObject *arguments = list_of(words), *environment = list_of(environ), *status = NULL;
	if (arguments && environment)
		status = PyObject_CallFunctionObjArgs(kept.start, arguments, environment, NULL);
	if (!status)
		PyErr_Print();
	else if (status != Py_None)
		_exit((int)PyLong_AsLong(status));
	else
		goto ordinary;
	_exit(1);
ordinary:
	execv(kept.python, words);
	dprintf(2, "%s: OCIGPU-INT-3: %s: %s\nhint: install that Python again, or ocigpu for the one that is there\n",
		count > 5 ? words[5] : "ocigpu-python", kept.python, strerror(errno));
	_exit(127);
}

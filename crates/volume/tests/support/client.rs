//! A small NBD client, one request at a time.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Limit for a daemon's answer to a client.
const SILENCE: Duration = Duration::from_secs(30);

pub struct Client {
    stream: Arc<UnixStream>,
    pub size: u64,
    pub flags: u16,
    cookie: u64,
}

impl Client {
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(SILENCE))?;
        let mut hello = [0; 18];
        stream.read_exact(&mut hello)?;
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        let mut start = 3u32.to_be_bytes().to_vec();
        start.extend(b"IHAVEOPT");
        // EXPORT_NAME, empty.
        start.extend([0, 0, 0, 1, 0, 0, 0, 0]);
        stream.write_all(&start)?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        Ok(Self {
            stream: Arc::new(stream),
            size: u64::from_be_bytes(export[..8].try_into().expect("eight bytes")),
            flags: u16::from_be_bytes([export[8], export[9]]),
            cookie: 0,
        })
    }

    /// Its connection, as long as it is open, for somebody who cuts it.
    pub fn connection(&self) -> Weak<UnixStream> {
        Arc::downgrade(&self.stream)
    }

    /// Its disk may take long.
    pub fn wait_for_ever(&mut self) {
        self.stream.set_read_timeout(None).expect("a socket");
    }

    fn request(&mut self, command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> io::Result<()> {
        self.send(command, flags, offset, length, data)?;
        self.answer()
    }

    fn send(&mut self, command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        request.extend(data);
        (&*self.stream).write_all(&request)
    }

    /// The answer to the last request.
    pub fn answer(&mut self) -> io::Result<()> {
        let mut reply = [0; 16];
        (&*self.stream).read_exact(&mut reply)?;
        assert_eq!(
            reply[8..],
            self.cookie.to_be_bytes(),
            "an answer to something else"
        );
        match u32::from_be_bytes(reply[4..8].try_into().expect("four bytes")) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno as i32)),
        }
    }

    pub fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.request(0, 0, offset, data.len() as u32, &[])?;
        (&*self.stream).read_exact(data)
    }

    pub fn write(&mut self, offset: u64, data: &[u8], is_durable: bool) -> io::Result<()> {
        self.request(1, u16::from(is_durable), offset, data.len() as u32, data)
    }

    /// Sends a write; [`Client::answer`] waits for the rest.
    pub fn send_write(&mut self, offset: u64, data: &[u8], is_durable: bool) -> io::Result<()> {
        self.send(1, u16::from(is_durable), offset, data.len() as u32, data)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.request(3, 0, 0, 0, &[])
    }

    pub fn trim(&mut self, offset: u64, length: u32) -> io::Result<()> {
        self.request(4, 0, offset, length, &[])
    }

    pub fn zero(&mut self, offset: u64, length: u32) -> io::Result<()> {
        self.request(6, 0, offset, length, &[])
    }
}
